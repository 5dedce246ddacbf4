#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts, from a trace alone, the prompt tokens that a prefix cache of whole pages must hit when it keeps everything and requests run one
after the other, and compares with what kvire_engine reports. Shares no code with the engine.

usage: check_hits.py KVIRE_ENGINE [TRACE] [--block-tokens N] [--requests N]
Without a trace it makes one with shared, partial and diverging blocks."""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

PAGE = 256
BLOCK = 512


def made_trace(count):
    """Conversations that grow, share their head, and end inside blocks; some prompts repeat whole, one is cut short."""
    rng = random.Random(7)
    next_id, open_ones, out = 1, [], []
    for _ in range(count):
        if not open_ones or rng.random() < 0.3:
            open_ones.append([rng.randrange(BLOCK, 12 * BLOCK), [0]])
        talk = rng.choice(open_ones)
        talk[0] += rng.choice([0, 0, 1, 300, BLOCK, 1400])
        while len(talk[1]) * BLOCK < talk[0]:
            talk[1].append(next_id)
            next_id += 1
        length = talk[0] if rng.random() < 0.8 else rng.randrange(1, talk[0])
        ids = talk[1][: -(-length // BLOCK)]
        if rng.random() < 0.3:  # the last block differs from the conversation's
            ids = ids[:-1] + [next_id]
            next_id += 1
        out.append({"timestamp": len(out), "input_length": length, "output_length": rng.randrange(1, 200), "hash_ids": ids})
    return out


def expected_hits(trace, block_tokens):
    """Whole pages of the longest prefix that an earlier request had, at most length - 1 tokens; a token is (block id, place in the block)."""
    seen = set()
    hits = prompts = 0
    for request in trace:
        length = request["input_length"] * block_tokens // BLOCK
        tokens = [(request["hash_ids"][i // block_tokens], i % block_tokens) for i in range(length)]
        prompts += length
        prefixes = [tuple(tokens[:end]) for end in range(PAGE, length + 1, PAGE)]
        whole = 0
        while whole < len(prefixes) and prefixes[whole] in seen and (whole + 1) * PAGE <= length - 1:
            whole += 1
        hits += whole * PAGE
        seen.update(prefixes)
    return hits, prompts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--policy", default="fp8")
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(args.trace or pathlib.Path(folder, "made.jsonl"))
        if args.trace is None:
            path.write_text("".join(json.dumps(r) + "\n" for r in made_trace(24)))
        trace = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if args.requests:
            trace = trace[: args.requests]
        hits, prompts = expected_hits(trace, args.block_tokens)
        pages = sum(-(-(r["input_length"] + r["output_length"]) * args.block_tokens // BLOCK // PAGE) + 1 for r in trace)
        result = pathlib.Path(folder, "result.json")
        command = [args.engine, "--trace", str(path), "--policy", args.policy, "--sessions", "1", "--layers", str(args.layers), "--quiet",
                   "--device-pages", str(pages + 1), "--host-pages", "0", "--block-tokens", str(args.block_tokens), "--json", str(result)]
        if args.requests:
            command += ["--requests", str(args.requests)]
        status = subprocess.run(command).returncode
        run = json.loads(result.read_text())["runs"][0]
    got = run["device_hit_tokens"] + run["host_hit_tokens"]
    print(f"prompt tokens {run['prompt_tokens']} (expected {prompts}), hit tokens {got} (expected {hits}), mismatched {run['mismatched_tokens']}")
    ok = status == 0 and got == hits and run["prompt_tokens"] == prompts and run["mismatched_tokens"] == 0 and hits > 0
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
