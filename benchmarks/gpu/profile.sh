#!/bin/bash
# What one profile of a GPU machine takes and is worth, on a 48-layer MoE of 16 GiB that this makes first:
#
#     bash benchmarks/gpu/profile.sh ENGINE_FOLDER RESULTS_FOLDER [WORK_FOLDER]
#
# 1. one profile, timed; 2. one interrupted after 20 s and continued; 3. plans for three budgets from the first;
# 4. those plans measured beside the best --n-cpu-moe. About 8 minutes on an H200.
set -u
engine=$1 out=$2 work=${3:-/tmp/atsplan-gpu-profile}
python=${PYTHON:-python3}
model=$work/qwen3moe.gguf
mkdir -p "$out" "$work"
export XDG_CACHE_HOME=$work/cache
atsplan() { "$python" atsplan.py "$@"; }
timed() { # NAME COMMAND...: the seconds of a command, into times.txt
    local name=$1 begin=$SECONDS code=0
    shift
    "$@" || code=$?
    echo "$name: $((SECONDS - begin)) s, exit code $code" | tee -a "$out/times.txt"
}
make_model() {
    "$python" -c "import sys; from pathlib import Path; from benchmarks.gpu import generated_models
generated_models.make('qwen3moe', Path(sys.argv[1]))" "$work"
}
whole() { atsplan profile "$model" --engine "$engine" -o "$out/profile.yaml" >"$out/profile.txt"; }
interrupted() {
    timeout -s INT 20 "$python" atsplan.py profile "$model" --engine "$engine" -o "$out/continued.yaml"
}
continued() {
    atsplan profile "$model" --engine "$engine" -o "$out/continued.yaml" --json >"$out/continued.json"
}
plan() { # MIB
    atsplan solve "$model" --profile "$out/profile.yaml" --budget "CUDA0=$1" --ctx 4096 \
        --workload prompt=512,gen=64,depth=544 -o "$out/plan-$1.yaml" >"$out/plan-$1.txt"
}
measure() { # MIB
    atsplan bench "$model" --plan "$out/plan-$1.yaml" --engine "$engine" --against n-cpu-moe \
        --rounds 2 --prompts 512 -n 64 --json >"$out/bench-$1.json"
}

timed "model written" make_model
timed "profile" whole
timed "profile interrupted after 20 s" interrupted
timed "profile continued" continued
for budget in 6000 10000 14000; do timed "plan of $budget MiB" plan "$budget"; done
for budget in 6000 10000 14000; do timed "plan of $budget MiB measured" measure "$budget"; done
"$python" - "$out" <<'END' | tee "$out/judged.txt"
import json, statistics, sys
from pathlib import Path

for path in sorted(Path(sys.argv[1]).glob("bench-*.json")):
    if not path.stat().st_size:
        continue
    data = json.loads(path.read_text())
    for each in data["contenders"]:
        decode = [times["median"] for times in each["decode_ns"].values()]
        if decode:
            measured, said = statistics.median(decode) / 1e6, data["predicted_tpot_ns"] / 1e6
            error = f", predicted {said:.2f} ms ({said / measured - 1:+.1%})" if each["name"] == "plan" else ""
            print(f"{path.stem}: {each['name']} {each['setting']}: {measured:.2f} ms a token{error}")
END
tail -n 20 "$out/profile.txt"
