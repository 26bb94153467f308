#!/bin/bash
# Hybrid experts against the stock rules on a GPU machine, in paired rounds:
#
#     bash benchmarks/gpu/hybrid.sh ENGINE RESULTS_FOLDER MINUTES CELLS [CONTENDERS]
#
# ENGINE: folder of a CUDA build of llama.cpp. Needs numpy, gguf and pydantic on PYTHON's path, and a C++ compiler.
set -u
engine=$1 out=$2 minutes=$3 wanted=$4 rivals=${5:-all in VRAM,n-cpu-moe,ngl}
python=${PYTHON:-python3} models=${MODELS:-/tmp/atsplan-models}
mkdir -p "$out" "$models"
"$python" -m benchmarks.rounds.experts --engine "$engine" --journal "$out/hybrid.jsonl" --folder "$models" \
    --contenders "$rivals" --cells "$wanted" --minutes "$minutes" --rounds "${ROUNDS:-5}" --gen "${GEN:-64}" \
    --ours "cpu lane=benchmarks.rounds.hybrid_contender:cpu_lane" \
    --ours "all lanes=benchmarks.rounds.hybrid_contender:all_lanes" 2>&1 | tee "$out/hybrid.log"
