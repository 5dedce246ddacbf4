#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs kvire_engine on one folder of files again and again, kills it with SIGKILL at random moments, and requires of every run that ends that
no token differs from a run without any cache, and of the last ones that blocks came back from the files of killed runs.

Then it damages every other file: the blocks are computed again, and no token differs.

usage: check_file_tier.py KVIRE_ENGINE [--kills N] [--seed N] [--policy P]"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--policy", default="fp8")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    ok = True
    with tempfile.TemporaryDirectory() as folder:
        files = pathlib.Path(folder, "files")
        result = pathlib.Path(folder, "result.json")
        command = [args.engine, "--policy", args.policy, "--requests", "12", "--device-pages", "11", "--host-pages", "16", "--sessions", "4",
                   "--layers", "3", "--quiet", "--json", str(result)]
        # Without files: how long it takes, and how much is computed.
        start = time.monotonic()
        ok &= subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
        seconds = time.monotonic() - start
        alone = json.loads(result.read_text())["runs"][0]
        command += ["--file-tier", str(files), "--file-bytes", str(1 << 30)]
        found = 0
        for _ in range(args.kills):
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            time.sleep(seconds * rng.uniform(0.3, 1.0))
            child.kill()
            child.wait()
            found = len(list(files.glob("*.kvire")))
        for name in ("after the kills", "with all files", "with damaged files"):
            damaged = name == "with damaged files"
            for i, path in enumerate(sorted(files.glob("*.kvire")) if damaged else []):
                data = bytearray(path.read_bytes())
                if i % 4 == 0:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                elif i % 4 == 2:
                    del data[rng.randrange(len(data)):]
                path.write_bytes(data)
            ok &= subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
            run = json.loads(result.read_text())["runs"][0]
            print(f"{name}: {run['mismatched_tokens']} mismatched tokens, {run['file_hit_tokens']} of {run['prompt_tokens']} prompt tokens from files, "
                  f"{run['recomputed_tokens']} computed (without files {alone['recomputed_tokens']}), {run['files_stored']} stored, {run['files_read']} read, "
                  f"{run['files_lost']} lost")
            ok &= run["mismatched_tokens"] == 0 and (run["files_lost"] > 0) == damaged and (run["files_stored"] > 0 or not damaged)
            if not damaged:
                ok &= run["file_hit_tokens"] > 0 and run["files_read"] > 0 and run["recomputed_tokens"] < alone["recomputed_tokens"]
        print(f"{found} records after {args.kills} kills")
        ok &= found > 0
        ok &= not list(files.glob("*.tmp"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
