"""Fragments are runs of the texts' words, seeded, as many as asked for."""

import pytest

from slimformer.compress.fragments import fragments

TEXTS = [f"{a}0 {a}1  {a}2\t{a}3 {a}4\n{a}5" for a in (f"w{i}-" for i in range(400))]


def draw(share: float, words: tuple[int, int] = (2, 4), seed: int = 0) -> list[str]:
    return fragments(TEXTS, share=share, words=words, seed=seed)


def test_equal_seeds_draw_equal_fragments() -> None:
    assert draw(0.5) == draw(0.5)
    assert draw(0.5) != draw(0.5, seed=1)


def test_fragments_are_contiguous_words_of_one_text() -> None:
    lengths, starts = set(), set()
    for part in draw(1.5):
        words = part.split(" ")
        text = next(text.split() for text in TEXTS if words[0] in text.split())
        start = text.index(words[0])
        assert text[start : start + len(words)] == words
        lengths.add(len(words))
        starts.add((start, len(words)))
    assert lengths == {2, 3, 4}
    assert {(0, 2), (4, 2), (0, 3), (3, 3), (0, 4), (2, 4)} <= starts


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 100), (0.5, 200), (1.0, 400), (1.5, 600), (2.0, 800)])
def test_share_counts_the_fragments(share: float, expected: int) -> None:
    found = draw(share)
    assert abs(len(found) - expected) <= (40 if share % 1 else 0)
    per_text = [sum(part.split(" ")[0] in text.split() for part in found) for text in TEXTS]
    assert max(per_text) <= int(share) + bool(share % 1)
    assert min(per_text) >= int(share)


def test_texts_no_longer_than_the_fragment_are_passed_over() -> None:
    assert fragments(["a b", "a", "", "  "], share=1, words=(2, 2), seed=0) == []
    assert fragments(["a b c"], share=1, words=(2, 2), seed=0) in (["a b"], ["b c"])
    assert fragments([], share=1.5, words=(1, 2), seed=0) == []
