"""A generate.onnx in a plain onnxruntime session, timed on demand.

usage: python onnxruntime_worker.py GENERATE.onnx THREADS

Answers each JSON line on stdin with one on stdout:
    {"sources": [[5, 6, …], …], "tokens": 24, "beams": 1}  -> {"seconds": 0.1, "outputs": [[…], …]}
"""

import json
import sys
import time

import numpy as np
import onnxruntime


def main() -> None:
    """Answer until stdin ends."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(sys.argv[2])
    options.log_severity_level = 3  # the warnings about inputs with defaults would hide the table
    session = onnxruntime.InferenceSession(sys.argv[1], options)
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        rows = asked["sources"]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        begin = time.perf_counter()
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        feed = {
            "input_ids": ids,
            "attention_mask": mask,
            "max_new_tokens": np.array(asked["tokens"]),
            "num_beams": np.array(asked["beams"]),
            "length_penalty": np.array(1.0, np.float32),
        }
        sequences = session.run(["sequences"], feed)[0]
        outputs = sequences[:, 0].tolist()
        print(json.dumps({"seconds": time.perf_counter() - begin, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
