#!/usr/bin/env bash
# Every test and measurement that wants a GPU, one after the other, in less than 25 minutes.
usage() {
  cat <<'USAGE'
Usage: [PYTHON=python3] benchmarks/gpu.sh [--results FOLDER] [--only NAME …] [--list] [--small] [--device cuda|cpu]

  --results FOLDER   where logs, tables and report.md go (default: outputs/gpu)
  --only NAME …      these pieces alone
  --list             print pieces, limits and commands, and run nothing
  --small            each piece for seconds, to see that it runs; numbers mean nothing
  --device cpu       the same without a GPU; with --small

PYTHON is taken as it is; else tools/setup.sh finds or installs one. A piece that its limit stops has what it
printed until then. Ends with 0 if all pieces ran, 1 if one failed or ran out of time.
USAGE
}
set -euo pipefail

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
total=1480 # seconds, of all pieces together
results=outputs/gpu device=cuda small="" list=""
only=()
while (($#)); do
  case $1 in
    --results) results=$2 && shift 2 ;;
    --device) device=$2 && shift 2 ;;
    --small) small=1 && shift ;;
    --list) list=1 && shift ;;
    --only)
      shift
      while (($#)) && [[ $1 != --* ]]; do only+=("$1") && shift; done
      ;;
    *)
      usage
      [[ $1 == --help || $1 == -h ]]
      exit
      ;;
  esac
done
if [[ $device == cpu ]]; then
  [[ $small ]] || { printf 'error: --device cpu shows that the pieces run, and needs --small\n' >&2 && exit 2; }
  export CUDA_VISIBLE_DEVICES=""
elif [[ $device != cuda ]]; then
  printf 'error: --device is cuda or cpu, not %s\n' "$device" >&2 && exit 2
fi

names=() limits=() commands=()
# A piece: its name, the seconds that it may take, its command.
add() {
  local name=$1 limit=$2
  shift 2
  if ((${#only[@]})) && [[ " ${only[*]} " != *" $name "* ]]; then return; fi
  names+=("$name") limits+=("$limit") commands+=("$(printf '%q ' "$@")")
}

scratch=SCRATCH # a folder of this run, when it is known
train=(-m toolkit.train --metrics.enable_tensorboard false --data.cache_folder "$scratch/tokens")
if [[ $small ]]; then
  train+=(--training.dataset embedded_validation --training.steps 4 --metrics.log_freq 1 --training.seq_len 64)
  train+=(--model.dim 64 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 128)
  train+=(--training.local_batch_size 2 --training.global_batch_size 4)
  attention=(--small) techniques=(--small --only baseline) profiled=4
else
  train+=(--model.name llama3.2 --model.flavor 1B --training.dataset embedded --training.steps 20)
  train+=(--training.seq_len 4096 --training.local_batch_size 2 --training.global_batch_size 8)
  train+=(--metrics.log_freq 5)
  attention=() profiled=10
  techniques=(--only baseline "bf16 compute" "bf16, " "same, flash" checkpointing "step in backward" "CPU offload")
fi
compiled=(--compile.enable --compile.cache_folder "$scratch/compiled")
if [[ $device == cpu ]]; then compiled+=(--compile.backend aot_eager); fi

add tests 380 -m pytest -q -m gpu tests
add pretrain_eager 130 "${train[@]}" --job.dump_folder "$scratch/eager"
add pretrain_compiled 220 "${train[@]}" "${compiled[@]}" --job.dump_folder "$scratch/compiled_run"
if [[ $device == cuda ]]; then
  add pretrain_cuda_graphs 220 "${train[@]}" "${compiled[@]}" --compile.mode reduce-overhead \
    --job.dump_folder "$scratch/cuda_graphs"
fi
add profile 100 "${train[@]}" --profiling.enable_profiling --profiling.profile_freq "$profiled" \
  --job.dump_folder "$scratch/profiled"
add attention 130 -m benchmarks.attention "${attention[@]}" --output "$results/attention.md"
add techniques 300 -m benchmarks.techniques "${techniques[@]}" --output "$results/techniques.md"

for name in "${only[@]}"; do
  [[ " ${names[*]} " == *" $name "* ]] || { printf 'error: no piece %s for %s\n' "$name" "$device" >&2 && exit 2; }
done
if [[ $list ]]; then
  for at in "${!names[@]}"; do
    printf '%-21s %4d s  python %s\n' "${names[at]}" "${limits[at]}" "${commands[at]}"
  done
  exit
fi

python=${PYTHON:-$(tools/setup.sh test)}
described=$("$python" -c "from benchmarks.machine import describe; print(describe('$device'))")
mkdir -p "$results"
results=$(readlink -f "$results")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1
report=$results/report.md
{
  printf '# On %s\n\n\x60benchmarks/gpu.sh%s\x60: %s\n\n' "${device^^}" "${small:+ --small}" "$described"
  printf 'Not here: benchmarks.peers, which compares on CPUs alone.\n\n'
  printf '| piece | | seconds | of at most | last line |\n|---|---|---|---|---|\n'
} | tee "$report"

failed=0
for at in "${!names[@]}"; do
  name=${names[at]} log=$results/${names[at]}.log
  left=$((total - SECONDS)) limit=${limits[at]} status=0 started=$SECONDS
  if ((left < limit)); then limit=$left; fi
  if ((limit < 10)); then
    ended="not begun: no time left" && failed=1
  else
    # The command was quoted word by word when it was added.
    command="timeout --kill-after=10 $limit $(printf '%q' "$python") ${commands[at]//SCRATCH/$scratch}"
    eval "$command" >"$log" 2>&1 </dev/null || status=$?
    case $status in
      0) ended=ran ;;
      124 | 137) ended="out of time" && failed=1 ;;
      *) ended="failed ($status)" && failed=1 ;;
    esac
  fi
  last=$(grep -v '^ *$' "$log" 2>/dev/null | tail -n 1 | tr '|' ' ' | cut -c 1-160 || true)
  printf '| %s | %s | %d | %d | %s |\n' "$name" "$ended" $((SECONDS - started)) "$limit" "$last" | tee -a "$report"
done
fence=$(printf '\x60\x60\x60')
for name in "${names[@]}"; do
  [[ -e $results/$name.log ]] || continue
  printf '\n## %s\n\n%s\n%s\n%s\n' "$name" "$fence" "$(tail -n 60 "$results/$name.log")" "$fence" >>"$report"
done
printf '\nthe whole is in %s\n' "$report"
exit "$failed"
