"""The command line: parse, call, print, exit code. torch and onnxruntime load inside a command, so help is quick.

Exit codes: 0 done; 1 internal failure; 2 bad usage or input, nothing written; 3 done, but a budget was missed.
"""

import errno
import io
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from . import __version__
from .terminal import Reporter, reporter
from .transformer.errors import InputError
from .transformer.files import refuse_existing, write_file

if TYPE_CHECKING:
    from .compress import Recipe
    from .export.runtime import Bundle
    from .transformer.data import Data

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DEFAULT_STEPS = "prune,distill,int8"
RESUMABLE = ("compress", "train")


class Commands(click.Group):
    """Turns what the user can mend into one line on stderr and exit code 2."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Keep the command as it was typed, for the report."""
        return super().make_context(info_name, args, *rest, **{"obj": shlex.join(["slimformer", *args]), **extra})

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; warnings of other libraries stay off the terminal unless python -W asks for them."""
        try:
            with warnings.catch_warnings():
                if not sys.warnoptions:
                    warnings.simplefilter("ignore")
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("stopped; --resume goes on" if ctx.invoked_subcommand in RESUMABLE else "stopped", err=True)
            ctx.exit(130)
        except (InputError, MemoryError, OSError, RuntimeError) as error:
            line = _mendable(error)
            if line is None:
                raise
            click.echo(f"error: {line}", err=True)
            ctx.exit(2)


def _mendable(error: Exception) -> str | None:
    """The one line for what the user can mend, or None for a failure of ours."""
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk does not take more{where}: {error.strerror}" if error.errno in FULL_DISK else None
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        return "the memory does not suffice: use smaller batches, texts or models"
    return None


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    try:
        found = tuple(int(part) for part in (value or "").split(",") if value)
    except ValueError:
        found = (0,)
    if any(number < 1 for number in found):
        raise click.BadParameter(f"{value!r} is not whole numbers of at least 1 with commas, such as 1,8,32")
    return found


def _words(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`int8,binary` as words."""
    return tuple(part.strip() for part in value.split(",")) if value else ()


def _stacks(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`6-2` as layers of encoder and decoder."""
    if value is None:
        return None
    parts = value.split("-")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is not two whole numbers with a dash, such as 6-2")
    return int(parts[0]), int(parts[1])


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
PATH = click.Path(path_type=Path)


def _choice(flag: str, values: Sequence[str], default: str | None, text: str) -> Decorator:
    return click.option(flag, type=click.Choice(values), default=default, show_default=default is not None, help=text)


def _out(metavar: str, text: str, *, required: bool = True) -> Decorator:
    return click.option("-o", "--out", type=PATH, required=required, metavar=metavar, help=text)


_data = click.option("--data", type=PATH, required=True, metavar="DIR", help="Directory of tables (see compress).")
_provider = _choice("--provider", ("cpu", "cuda"), "cpu", "What onnxruntime serves with.")
_target = _choice(
    "--target",
    ("avx2", "avx512", "vnni", "amx", "neon"),
    None,
    "CPU that serves: int8 weights get the bits that it multiplies exactly, 7 on the first two.  [default: this one]",
)
_device = _choice("--device", ("cpu", "cuda"), "cpu", "What torch trains with.")
_threads = click.option("--threads", type=click.IntRange(min=1), help="onnxruntime's threads.  [default: all cores]")
_seed = click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice.")
_portable = click.option(
    "--portable", is_flag=True, help="Default forms of the graph; otherwise those that are fastest here are taken."
)
_force = click.option("--force", is_flag=True, help="Replace an existing output.")
_resume = click.option("--resume", is_flag=True, help="Go on with what was broken off; what is finished ends at once.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there.")
_task = _choice(
    "--task",
    ("embedding", "classification", "translation", "summarization", "language"),
    None,
    "What the data is for; by default its tables say.",
)
_max_length = click.option("--max-length", type=click.IntRange(min=3), help="Cut of every text, in tokens.")


def _minutes(text: str) -> Decorator:
    return click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help=text)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="slimformer")
def main() -> None:
    """Make a Transformer small and fast, export it to ONNX, and prove its accuracy and latency.

    MODEL is a slimformer checkpoint of any task, a BERT or sentence-transformers directory, or a hub id.

    \b
    Example:
      slimformer export all-MiniLM-L6-v2/ -o bundle/ --format int8
      slimformer predict bundle/ queries.txt -o vectors.npy
    """


@main.command("compress")
@click.argument("model")
@click.option("--data", type=PATH, required=True, metavar="DIR", help="Directory of tables; see above.")
@_out("OUT", "Directory to make: report, bundle/, model/, stages/.")
@_task
@click.option("--steps", metavar="LIST", help=f"Steps with their default options.  [default: {DEFAULT_STEPS}]")
@click.option("--recipe", type=PATH, metavar="FILE", help="Steps with their options, in TOML.")
@click.option("--max-drop", metavar="DROP", help="Budget: 1 or 1pt (points of the deciding metric), or 2% of it.")
@_choice("--workload", ("sorted", "mixed", "single"), "sorted", "Whose speed-up is named first.")
@_provider
@_threads
@_target
@_portable
@_device
@_minutes("Of the distill step, with --steps.")
@click.option(
    "--prune",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the prune step, with --steps; may be given again: speedup=2, cost=0.4, layers=3, format=int8.",
)
@click.option(
    "--keep-index", is_flag=True, help="Pages stay as MODEL embedded them: learn and judge to search those by queries."
)
@click.option("--tensorboard", type=PATH, metavar="DIR", help="Write there for TensorBoard while students learn.")
@_max_length
@_seed
@_resume
@_force
@_json
@click.pass_obj
def compress_command(
    command: str,
    /,
    *,
    model: str,
    data: Path,
    out: Path,
    task: str | None,
    steps: str | None,
    recipe: Path | None,
    minutes: float | None,
    prune: tuple[str, ...],
    max_length: int | None,
    max_drop: str | None,
    target: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Prune, distil and quantize MODEL; measure every step in onnxruntime beside the untouched model.

    DIR holds, as .jsonl, .csv, .tsv (also .gz) or .parquet: for search, pages (id, text), queries-valid and
    queries-test (query, pages) and texts (text); or train, valid and test, for classification of text and label, for
    translation of source and target, for summarization of text and summary, for language models of text (with --task
    language where rows have more than that); or texts alone. Training reads texts, pages and train; choices are made on
    valid; test is opened once, at the end.

    The exit code is 3 where --max-drop was given and the 95 % interval does not prove it; the result is there all the
    same.

    \b
    Example, that of the README:
      slimformer compress all-MiniLM-L6-v2/ --data examples/help-search \\
          --recipe examples/help-search/recipe.toml --max-drop 2 -o runs/demo
    The same without a recipe:
      slimformer compress all-MiniLM-L6-v2/ --data examples/help-search \\
          --steps prune,distill,int8 --minutes 8 --max-length 128 --max-drop 2pt -o runs/demo
    Pruned until it is twice as fast here, without training:
      slimformer compress all-MiniLM-L6-v2/ --data examples/help-search --steps prune --prune speedup=2 -o runs/twice
    """
    if not options["resume"] and not _follows():
        refuse_existing(out, force=options["force"])
    progress = _progress()
    with _busy(progress, "read model and data"):
        from .compress import compress
        from .export.machine import advice
        from .export.summary import key_numbers, report_text
        from .transformer import load, load_data

        chosen, budget = _recipe(steps, recipe, minutes, prune, max_length), _budget(max_drop)
        rows, checkpoint = load_data(data, task), load(model)
    for line in [f"deciding metric {_deciding(rows)}; {budget}", *(f"advice: {line}" for line in advice(target))]:
        click.echo(line, err=as_json)
    shown: dict[str, Any] = {"data_name": str(data), "command": command, "progress": progress, "target": target}
    result = compress(checkpoint, rows, out=out, recipe=chosen, max_drop=max_drop, **shown, **options)
    if as_json:
        found = {"bundle": str(result.bundle), "report": str(out / "report.json"), "met": result.met}
        click.echo(json.dumps({**found, **key_numbers(result.report)}))
    else:
        speed = f"{result.speedup.ratio:.2f}x [{result.speedup.low:.2f}, {result.speedup.high:.2f}]"
        click.echo(f"{report_text(result.report)}\nspeed-up, {options['workload']}: {speed}, 95 % interval")
        click.echo(f"bundle: {result.bundle}\nreport: {out / 'report.html'}")
    click.get_current_context().exit(result.exit_code)


def _recipe(
    steps: str | None, recipe: Path | None, minutes: float | None, prune: Sequence[str], max_length: int | None
) -> "Recipe":
    from .compress.recipe import ALIASES, read_options, read_recipe, steps_named

    if steps is not None and recipe is not None:
        raise click.UsageError("--steps and --recipe are both given: give one")
    if recipe is not None:
        for flag, value in (("--minutes", minutes), ("--prune", prune)):
            if value:
                raise click.UsageError(f"{flag} goes with --steps; a recipe says the options of each step in its table")
        found = read_recipe(recipe)
    else:
        names = [name.strip() for name in (steps or DEFAULT_STEPS).split(",")]
        options = {"prune": read_options(prune), "distill": {} if minutes is None else {"minutes": minutes}}
        for step, flag in (("prune", "--prune"), ("distill", "--minutes")):
            if options[step] and step not in [ALIASES.get(name, name) for name in names]:
                raise click.UsageError(f"{flag} is about the {step} step, which is not among --steps")
        found = steps_named(names, options)
    return found if max_length is None else replace(found, max_length=max_length)


def _budget(max_drop: str | None) -> str:
    """The budget in numbers."""
    from .compress.budget import MaxDrop

    if max_drop is None:
        return "no budget given"
    drop = MaxDrop.parse(max_drop)
    return f"--max-drop {drop.value:.2f} " + ("% of the original's" if drop.relative else "points")


def _deciding(rows: "Data") -> str:
    """The metric that a budget is about."""
    from .transformer.data import LabelledData, PairData, TextData
    from .transformer.metrics import CLASSIFICATION_NAMES, SEARCH_NAMES
    from .transformer.text_metrics import DECIDING, Likelihood

    if isinstance(rows, LabelledData):
        return CLASSIFICATION_NAMES[0]
    if isinstance(rows, PairData):
        return DECIDING[rows.task]
    if isinstance(rows, TextData):
        return Likelihood().names[0]
    return SEARCH_NAMES[0] if rows.pages else f"overlap@{min(10, len(rows.texts) - 1)}"


@main.command("export")
@click.argument("model")
@_out("BUNDLE", "Directory to make.")
@_choice(
    "--format",
    ("fp32", "fp16", "bf16", "int8"),
    None,
    "None needs data; fp16 and bf16, of the linears, are for --provider cuda.  [default: as the model is]",
)
@_choice("--layout", ("packed", "padded"), None, "packed drops the padding inside.  [default: the provider's best]")
@click.option("--fastest", is_flag=True, help="Time equivalent forms of the graph here and take the fastest.")
@_provider
@_target
@_force
def export_command(
    *,
    model: str,
    out: Path,
    format: str | None,
    layout: str | None,
    fastest: bool,
    provider: str,
    target: str | None,
    force: bool,
) -> None:
    """Write MODEL as an ONNX bundle and check that it computes what PyTorch does (exit code 3 if not).

    \b
    Example:
      slimformer export all-MiniLM-L6-v2/ -o bundle/ --format int8
    """
    refuse_existing(out, force=force)
    if fastest and (layout is not None or provider != "cpu"):
        raise click.UsageError("--fastest takes the layout by time, on the CPU: leave out --layout and --provider")
    progress = _progress()
    with _busy(progress, "export and compare with PyTorch"):
        from .export.bundle import export, format_of, in_format
        from .export.contents import graph_file, read_own, stored_bytes
        from .export.decoding_parity import check_decoding
        from .export.form_times import measured
        from .export.machine import HALF_ON_CPU
        from .export.numbers import megabytes, scientific
        from .export.time_store import FORMS_FILE, machine_store
        from .export.validation import check_parity, vocabulary_texts
        from .transformer import load
        from .transformer.config import LanguageHead
        from .transformer.layer_config import FLOAT16

        checkpoint = load(model)
        exported = in_format(checkpoint, format, target)
        chosen = measured(exported, stores=[machine_store(FORMS_FILE)], progress=progress) if fastest else None
        ways: dict[str, Any] = {"forms": chosen.forms, "measured": {"forms": chosen.to_dict()}} if chosen else {}
        progress.start("export and compare with PyTorch", None, "")
        export(exported, out, layout=layout, provider=provider, force=force, **ways)
        original = checkpoint if format_of(exported.config) != format_of(checkpoint.config) else None
        texts = vocabulary_texts(exported)
        writes = isinstance(exported.config.head, LanguageHead)
        if writes:
            decoding = check_decoding(exported, out, texts, provider=provider)
        else:
            parity = check_parity(exported, out, texts=texts, original=original, provider=provider)
    graph = out / graph_file(exported.config)
    form = f"{format_of(exported.config)}, {read_own(out)['layout']}{f', for {target}' if target else ''}"
    click.echo(f"{graph}: {megabytes(stored_bytes(out))} MB, {form}")
    for line in chosen.lines() if chosen else ():
        click.echo(f"form {line}")
    if provider == "cpu" and FLOAT16 in exported.config.formats:
        click.echo(f"advice: {HALF_ON_CPU}")
    passed = decoding.passed if writes else parity.passed
    held = "held" if passed else "NOT held: do not deploy this bundle"
    if writes:
        shares = f"{decoding.greedy_equal:.0%} of {decoding.texts} texts equal greedily, {decoding.beams_equal:.0%}"
        tokens = f"{decoding.tokens_equal:.1%} of {decoding.tokens} tokens chosen alike, one at a time "
        tokens += f"{decoding.steps_equal:.1%}"
        click.echo(f"parity {held}: {shares} with beams, {tokens}; at least {decoding.limit:.0%} {decoding.measured}")
        click.get_current_context().exit(0 if passed else 3)
    value = scientific(getattr(parity, parity.measured))
    click.echo(f"parity {held}: {parity.measured} {value}, limit {scientific(parity.limit)}, {parity.shapes} shapes")
    click.get_current_context().exit(0 if parity.passed else 3)


@main.command("evaluate")
@click.argument("model", metavar="MODEL_OR_BUNDLE")
@_data
@_choice("--split", ("valid", "test"), "test", "What to judge on.")
@click.option("--against", metavar="ORIGINAL", help="A model or bundle to compare with, example by example.")
@_task
@click.option("--beams", type=click.IntRange(min=1), default=1, show_default=True, help="Of models that write.")
@click.option("--keep-index", is_flag=True, help="Search MODEL's queries in pages that ORIGINAL embedded.")
@click.option(
    "--dimensions", callback=_numbers, metavar="LIST", help="Judge vectors cut to so many first columns too: 64,128."
)
@click.option(
    "--precision",
    "precisions",
    callback=_words,
    metavar="LIST",
    help="Judge vectors kept so too: int8,binary; each with queries alike and float ones.",
)
@_provider
@_threads
@_json
def evaluate_command(*, model: str, data: Path, as_json: bool, **options: Any) -> None:
    """Judge a model in onnxruntime; --against adds 95 % intervals of the difference and the answers that changed.

    For search, --dimensions and --precision add a table: what MODEL's vectors are worth if they cost less to keep, with
    95 % intervals of the difference from whole float32 ones. int8 has the ranges of the pages' columns and is ranked by
    cosine, binary by Hamming distance; pages of equal score rank in the order of the data.

    \b
    Example:
      slimformer evaluate runs/demo/bundle --data examples/help-search --against all-MiniLM-L6-v2/
      slimformer evaluate runs/demo/bundle --data examples/help-search --dimensions 64,128 --precision int8,binary
    """
    from .compress.judging import judge
    from .export.summary import evaluation_text

    result = judge(model, data, progress=_progress(), **options)
    click.echo(json.dumps(result) if as_json else evaluation_text(result))


@main.command("latency")
@click.argument("models", metavar="MODEL_OR_BUNDLE...", nargs=-1, required=True)
@click.option("--batch", callback=_numbers, metavar="LIST", help="Batch sizes of random tokens.  [default: 1,8,32]")
@click.option("--seq", callback=_numbers, metavar="LIST", help="Their lengths in tokens.  [default: 16,128]")
@click.option("--data", type=PATH, metavar="DIR", help="Time texts of DIR too: sorted, mixed and single.")
@_task
@click.option("--threads", callback=_numbers, metavar="LIST", help="onnxruntime's threads.  [default: all cores]")
@_provider
@_seed
@_out("FILE", "Write everything measured as JSON.", required=False)
@_force
def latency_command(
    *, models: tuple[str, ...], seq: tuple[int, ...], batch: tuple[int, ...], data: Path | None, **options: Any
) -> None:
    """Time models side by side, each in its own process; the first one is the baseline of every ratio.

    A MODEL that is no bundle is exported for it: the baseline padded in its own format, the others as they would be
    served. With --data, shapes are timed only if --batch or --seq is given.

    \b
    Example:
      slimformer latency all-MiniLM-L6-v2/ runs/demo/bundle --data examples/help-search --threads 1,2
    """
    from .compress.judging import time_models
    from .export.machine import describe_machine
    from .export.summary import latency_text

    out = options.pop("out")
    _refuse(out, options.pop("force"))
    runs = []
    for result in time_models(models, batches=batch, lengths=seq, directory=data, progress=_progress(), **options):
        click.echo(latency_text(result))
        runs.append(result.to_dict())
    if out is not None:
        write_file(out, json.dumps({"machine": describe_machine(), "runs": runs}, indent=2) + "\n")


@main.command("inspect")
@click.argument("model", metavar="MODEL_OR_BUNDLE")
@_json
def inspect_command(*, model: str, as_json: bool) -> None:
    """Show what is in a model: sizes, cost per layer, formats, and advice for this machine.

    \b
    Example:
      slimformer inspect runs/demo/bundle
    """
    from .export.inspection import inspect_model, render_inspection

    found = inspect_model(model)
    click.echo(json.dumps(found) if as_json else render_inspection(found))


@main.command("predict")
@click.argument("bundle", type=PATH)
@click.argument("file", type=click.File("rb"), default="-")
@_out("FILE", "Vectors as .npy, or the table of labels, instead of stdout.", required=False)
@click.option("--prompt", metavar="NAME", help="The model's prompt to put before each text.")
@click.option("--dimensions", type=click.IntRange(min=1), help="Of vectors: the first columns kept.  [default: all]")
@_choice(
    "--precision", ("float32", "int8", "binary"), None, "Of vectors: binary is a bit a column.  [default: float32]"
)
@click.option(
    "--calibration", type=PATH, metavar="FILE", help="Of int8: float32 vectors of the pages, as -o writes them."
)
@click.option(
    "--beams", type=click.IntRange(min=1), default=1, show_default=True, help="Of what is written; 1 is greedy."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most tokens written.  [default: what fits]")
@click.option("--sample", is_flag=True, help="Draw tokens instead of taking the best.")
@click.option("--temperature", type=float, help="Of --sample: logits are divided by it.  [1]")
@click.option("--top-k", type=int, help="Of --sample: so many of the most probable tokens are kept; 0: all.  [0]")
@click.option("--top-p", type=float, help="Of --sample: the fewest tokens of this probability are kept.  [1]")
@click.option("--seed", type=int, help="Of --sample.  [0]")
@click.option("--stream", is_flag=True, help="Print what is written token by token, as it comes.")
@_provider
@_threads
@_force
def predict_command(
    *,
    bundle: Path,
    file: IO[bytes],
    out: Path | None,
    prompt: str | None,
    dimensions: int | None,
    precision: str | None,
    calibration: Path | None,
    beams: int,
    max_new_tokens: int | None,
    sample: bool,
    stream: bool,
    force: bool,
    **options: Any,
) -> None:
    """Embed, classify, translate or continue each line of FILE (- or nothing: stdin) with BUNDLE alone, without torch.

    Embedders give JSON lines of text and embedding, or with -o an array (lines, width), in the forms that evaluate
    judges (--dimensions, --precision; pages and queries with the same --calibration); classifiers give label,
    probability and text with tabs between; translators and summarizers a line for each line, language models what
    follows it. A translator refuses a line that is too long; a summarizer reads its beginning and says how many it cut.

    \b
    Example:
      echo "freeze the first row" | slimformer predict runs/demo/bundle
      slimformer predict runs/demo/bundle queries.txt -o vectors.npy
      slimformer predict runs/demo/bundle queries.txt --precision int8 --calibration pages.npy -o vectors.npy
      slimformer predict writer/ prompts.txt --sample --top-p 0.9 --seed 7
      echo "Open the file." | slimformer predict translator/ --stream
    """
    from .export.runtime import load_bundle
    from .export.summary import label_lines, vector_bytes, vector_lines
    from .transformer.config import ClassificationHead, LanguageHead

    _refuse(out, force)
    drawing = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "seed")}
    drawing = {name: value for name, value in drawing.items() if value is not None}
    if drawing and not sample:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in drawing)
        raise InputError(f"without --sample nothing is drawn: give it, or leave out {flags}")
    if stream:
        _refuse_stream(beams, out)
    opened, texts = load_bundle(bundle, **options), _lines(file)
    form = _form(opened, dimensions, precision, calibration)
    if stream:
        _say_cut(opened, texts)
        _stream(opened, texts, {"max_new_tokens": max_new_tokens, "sample": sample, **drawing})
        return
    progress = _progress()
    content: str | bytes
    if isinstance(opened.config.head, LanguageHead):
        write = opened.translate if opened.config.encoder else opened.generate
        if opened.config.head.summarizes:
            write = opened.summarize
        _say_cut(opened, texts)
        search: dict[str, Any] = {"beams": beams, "sample": sample, **drawing}
        lines = write(texts, max_new_tokens=max_new_tokens, progress=progress, **search)
        content = "".join(" ".join(line.splitlines()) + "\n" for line in lines)
    elif isinstance(opened.config.head, ClassificationHead):
        content = label_lines(opened.classify(texts, progress=progress), texts)
    elif out is not None and out.suffix != ".npy":
        raise InputError(f"{out}: vectors are written as .npy; name the output so")
    else:
        vectors = opened.embed(texts, prompt=prompt, progress=progress, **form)
        content = vector_lines(vectors, texts) if out is None else vector_bytes(vectors)
    if out is None:
        click.echo(content, nl=False)
    else:
        write_file(out, content)


def _form(bundle: "Bundle", dimensions: int | None, precision: str | None, calibration: Path | None) -> dict[str, Any]:
    """What `Bundle.embed` is told of the vectors' form; refuses options that are of no use here."""
    from .transformer.config import EmbeddingHead
    from .transformer.vectors import find_ranges, read_vectors

    given = {"--dimensions": dimensions, "--precision": precision, "--calibration": calibration}
    flags = [flag for flag, value in given.items() if value is not None]
    if flags and not isinstance(bundle.config.head, EmbeddingHead):
        raise InputError(f"{flags[0]} is of vectors, and {bundle.path} gives none: leave it out")
    if calibration is not None and precision != "int8":
        raise InputError("--calibration is of --precision int8: give both, or leave it out")
    form: dict[str, Any] = {"dimensions": dimensions or 0, "precision": precision or "float32"}
    if calibration is not None:
        form["ranges"] = find_ranges(read_vectors(calibration), dimensions or 0)
    return form


def _refuse_stream(beams: int, out: Path | None) -> None:
    if beams > 1:
        raise InputError(f"--beams {beams} knows no token before the last one: leave out --stream or --beams")
    if out is not None:
        raise InputError("--stream prints: leave it out to write a file, or redirect what is printed")


def _say_cut(bundle: "Bundle", texts: Sequence[str]) -> None:
    """Say of how many texts a summarizer reads the beginning."""
    reader = bundle.sources
    if reader is not None and (cut := reader.cut(texts)):
        click.echo(f"cut at {reader.limit} tokens: {cut} of {len(texts)} lines", err=True)


def _stream(bundle: "Bundle", texts: Sequence[str], way: Mapping[str, Any]) -> None:
    """Print a line for each text while it is written; a line break within it becomes a space."""
    for text in texts:
        written = shown = ""
        for piece in bundle.stream(text, **way):
            written += piece
            line = " ".join(written.splitlines())
            click.echo(line[len(shown) :], nl=False)
            shown = line
        click.echo()


def _lines(file: IO[bytes]) -> list[str]:
    """The lines of a UTF-8 file, whatever ends them."""
    name = getattr(file, "name", "stdin")
    try:
        texts = [line.removesuffix("\r") for line in file.read().decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 ({error.reason} at byte {error.start})") from error
    texts = texts[:-1] if texts[-1] == "" else texts
    if not texts:
        raise InputError(f"{name} has no lines: give one text a line")
    return texts


@main.command("report")
@click.argument("runs", metavar="OUT...", nargs=-1, required=True, type=PATH)
@_out(
    "FILE",
    "Of trainings: the page that shows them side by side.  [default: training.html of the first]",
    required=False,
)
@_force
def report_command(*, runs: tuple[Path, ...], out: Path | None, force: bool) -> None:
    """Render the reports of runs again from their report.json; of several runs, print a table that compares them.

    Directories that train made are shown on one page: loss, metric, learning rate and gradients over the steps.

    \b
    Example:
      slimformer report runs/demo runs/int8
      slimformer report runs/transformer runs/lstm -o curves.html
    """
    from .export.report import HTML_FILE, compare_reports, load_report, write_report
    from .export.summary import report_text
    from .export.training_page import is_training

    if all(is_training(run) for run in runs):
        _training_page(runs, out, force)
        return
    if out is not None:
        raise InputError("-o is for trainings: the report of a run is rendered where it is")
    reports = {str(run): load_report(run) for run in runs}
    for run, report in zip(runs, reports.values(), strict=True):
        folder = run if run.is_dir() else run.parent
        write_report(report, folder)
        click.echo(f"rendered {folder / HTML_FILE}", err=True)
    alone = len(reports) == 1
    click.echo(report_text(next(iter(reports.values()))) if alone else compare_reports(reports))


def _training_page(runs: Sequence[Path], out: Path | None, force: bool) -> None:
    """Show trainings side by side."""
    from .export.summary import table
    from .export.training_page import TRAINING_FILE, read_training, table_of, write_training

    _refuse(out, force)
    trainings = [read_training(str(run), run) for run in runs]
    page = out or runs[0] / TRAINING_FILE
    write_training(trainings, page)
    shown = table_of(trainings)
    click.echo(table(shown.heads, [[cell.text for cell in row] for row in shown.rows]))
    click.echo(f"rendered {page}", err=True)


@main.command("train")
@click.argument("model", required=False)
@_data
@_task
@_out("OUT", "Checkpoint directory to make.")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over train.  [default: 3; of pairs 10]")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps, instead of --epochs.")
@_minutes("Time to train, instead of --epochs.")
@click.option("--lr", type=float, help="Peak learning rate.")
@_choice(
    "--schedule",
    ("linear", "inverse_sqrt"),
    None,
    "How the rate falls.  [default: linear; of pairs inverse_sqrt]",
)
@click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), help="Of embeddings and sub-layers.")
@_choice("--precision", ("float32", "bfloat16"), None, "In which matrices are multiplied.  [default: float32]")
@click.option("--batch-tokens", type=click.IntRange(min=1), help="Greatest number of tokens in a batch.")
@_max_length
@click.option("--layers", metavar="E-D", callback=_stacks, help="New model: layers of encoder and decoder.  [6-6; 0-6]")
@click.option("--width", type=click.IntRange(min=2), help="New model: d_model.  [256]")
@click.option("--heads", type=click.IntRange(min=1), help="New model: heads of a layer.  [4]")
@click.option("--neurons", type=click.IntRange(min=1), help="New model: neurons of an FFN.  [1024]")
@_choice(
    "--mixer",
    ("attention", "rnn", "lstm", "gru", "ssru"),
    None,
    "New model: its mixer.  [attention]",
)
@click.option("--group", type=click.IntRange(min=1), help="New model: heads that share keys and values.  [1]")
@click.option(
    "--vocabulary", type=click.IntRange(min=260), default=8000, show_default=True, help="New model: subwords."
)
@click.option("--vectors", type=PATH, metavar="FILE", help="New model: word vectors to begin with, as text (or .gz).")
@click.option("--tensorboard", type=PATH, metavar="DIR", help="Write the curve there for TensorBoard while it runs.")
@_device
@_seed
@_resume
@_force
def train_command(
    *,
    model: str | None,
    data: Path,
    task: str | None,
    out: Path,
    vocabulary: int,
    tensorboard: Path | None,
    **options: Any,
) -> None:
    """Train on the rows of train; keep the best epoch on valid, measure it once on test.

    Rows of text and label fine-tune MODEL as a classifier; without one of these labels it gets a new one. Rows of
    source and target teach an encoder-decoder to translate, rows of text and summary to summarize, rows of text a
    decoder to write: MODEL, or without it a new one with subwords of its own. Pairs that are too long are left out and
    counted; a text to summarize is cut at --max-length (or what the model reads), and counted. --layers 2-0 makes a new
    classifier, of attention or of cells.

    \b
    Example:
      slimformer train all-MiniLM-L6-v2/ --data examples/help-topics -o runs/topics-model --epochs 3
      slimformer compress runs/topics-model --data examples/help-topics -o runs/topics --max-drop 2
      slimformer train --data pairs/ -o runs/translator --layers 6-2 --mixer ssru --minutes 30
      slimformer train --data examples/help-summaries -o runs/summarizer --layers 3-2 --max-length 64 --minutes 25
      slimformer train --data examples/help-topics -o runs/lstm --layers 2-0 --mixer lstm --epochs 10
      slimformer train --data examples/help-topics --task language -o runs/writer --layers 0-4 --epochs 10
    """
    ways = {name: options.pop(name) for name in ("device", "resume", "force")}
    if not ways["resume"] and not _follows():
        refuse_existing(out, force=ways["force"])
    layers, vectors = options.pop("layers"), options.pop("vectors")
    shape = {name: options.pop(name) for name in ("width", "heads", "group", "neurons", "mixer")}
    shape = {name: value for name, value in shape.items() if value is not None}
    of_new = [*(["layers"] if layers else []), *shape, *(["vectors"] if vectors else [])]
    if model and of_new:
        raise InputError(f"--{of_new[0]} is of a new model: leave it out, or MODEL")
    given = {name: value for name, value in options.items() if value is not None}
    progress = _progress()
    with _busy(progress, "read model and data"):
        from .export.numbers import points
        from .export.summary import table
        from .transformer.lesson import NOTES
        from .transformer.processes import launched
        from .transformer.trainings import NewModel, training_for

        taught = training_for(data, model, NewModel(layers, shape, vocabulary, vectors), given, task)
    processes = launched(ways["device"])
    tuned = taught(out, progress=progress, board=tensorboard, processes=processes, **ways)
    notes = tuned.provenance[NOTES]
    names = list(notes["test"])
    lines = [[str(entry["epoch"]), *(points(entry[name]) for name in names)] for entry in notes["epochs"]]
    click.echo(table(["epoch", *(f"{name}, valid" for name in names)], lines))
    if cut := tuned.provenance.get("sources_cut"):
        click.echo(f"texts cut at {tuned.config.text.max_length} tokens: {cut} of train")
    test = ", ".join(f"{name} {points(value)}" for name, value in notes["test"].items())
    click.echo(f"test, once, with epoch {notes['best']}: {test}\nmodel: {out}")


def _refuse(out: Path | None, force: bool) -> None:
    if out is not None:
        refuse_existing(out, force=force)


def _follows() -> bool:
    """Whether a launcher started this process beside the main one, which alone writes and prints."""
    return os.environ.get("RANK", "0") != "0"


def _progress() -> Reporter:
    """Progress on stderr, closed with the command; none of a process that follows another, nor anything on stdout."""
    if _follows():
        sys.stdout = io.StringIO()
    progress = reporter(io.StringIO() if _follows() else None)
    click.get_current_context().call_on_close(progress.close)
    return progress


@contextmanager
def _busy(progress: Reporter, title: str) -> Iterator[None]:
    """Show that something goes on whose length is not known."""
    progress.start(title, None, "")
    yield
    progress.done()


if __name__ == "__main__":
    main()
