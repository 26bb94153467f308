#!/bin/bash
# The solver's own plans against the stock rule and equal slots on a GPU machine, by a profile of the same visit:
#
#     bash benchmarks/gpu/planned.sh ENGINE RESULTS_FOLDER MINUTES CELLS [CONTENDERS]
#
# ENGINE: folder of a CUDA build of llama.cpp. Needs this project's packages on PYTHON's path, and a C++ compiler.
set -u
engine=$1 out=$2 minutes=$3 wanted=$4 rivals=${5:-n-cpu-moe}
python=${PYTHON:-python3} models=${MODELS:-/tmp/atsplan-models}
mkdir -p "$out" "$models"
export ATSPLAN_PROFILE=$out/profile.yaml
if [ ! -e "$ATSPLAN_PROFILE" ]; then
    model=$("$python" -c '
import sys
from pathlib import Path
from benchmarks.rounds.experts import Models
print(Models(Path(sys.argv[1]), "large", {}).ready("qwen3-30b")[0])' "$models")
    "$python" atsplan.py profile "$model" --engine "$engine" -o "$ATSPLAN_PROFILE"
fi
"$python" -m benchmarks.rounds.experts --engine "$engine" --journal "$out/planned.jsonl" --folder "$models" \
    --contenders "$rivals" --cells "$wanted" --minutes "$minutes" --rounds "${ROUNDS:-4}" --gen "${GEN:-40}" \
    --ours "all_lanes=benchmarks.rounds.hybrid_contender:all_lanes" \
    --ours "plan=benchmarks.rounds.planned_contender:planned" 2>&1 | tee "$out/planned.log"
