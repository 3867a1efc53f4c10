#!/usr/bin/env bash
# Trains the model that a TOML file describes; sets up what is missing on first use.
usage() {
  cat <<'USAGE'
Usage: [NAME=value …] ./run_train.sh [--table.key value …]

  NGPU=N                 ranks on this machine (default: one a GPU, or 2 on the CPU)
  CONFIG_FILE=FILE       what to train (default: train_configs/debug_model.toml)
  LOG_RANK=0,1           ranks whose output is shown (default: 0)
  SHUTDOWN_TIMEOUT=S     seconds that the ranks get to save after a signal (default: 600)
  NNODES=N NODE_RANK=I MASTER_ADDR=HOST MASTER_PORT=PORT
                         several machines: the same command on each, I from 0; HOST is machine 0
                         (tools/slurm/train.sbatch does it under SLURM)
  NNODES=MIN:MAX         go on with fewer machines when some are lost, and with more when they return
  MAX_RESTARTS=N         start again after a failure, N times in a row without a new checkpoint (default: 0,
                         or 3 with MIN:MAX)
  JOIN_TIMEOUT=S NODE_TIMEOUT=S LAST_CALL_TIMEOUT=S
                         seconds for machines to come (600), to be silent (20), and that MIN wait for MAX (30)
  SAMPLE=TEXT            let the trained model go on from TEXT at the end (default: a few words after the
                         debug run, else none)
  COMM_MODE=fake_backend check and describe the run of NGPU x NNODES ranks, trained by none: mesh, stages
                         and what the ranks of LOG_RANK hold; one process, no GPU, any NGPU

Any value of the file can be given as an option, for example --training.steps 100 --optimizer.lr 3e-4.
Relative paths among them start at the folder of this script, as ./outputs does.
Ends with 0: finished; 2: the configuration is wrong; 3: data or a checkpoint cannot be used;
75: stopped by a signal after saving, start again to go on; 1: anything else.
USAGE
}
set -euo pipefail

root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=
for argument in "$@"; do
  if [[ $argument == --help || $argument == -h ]]; then
    usage
    python=$("$root/tools/setup.sh" --check) || {
      printf '\nAfter the first run, --help lists every option.\n'
      exit 0
    }
  fi
done
python=${python:-$("$root/tools/setup.sh")}
config=${CONFIG_FILE:-$root/train_configs/debug_model.toml}
if [[ -z ${CONFIG_FILE:-} && " $*" != *" --job.config"[_-]file* ]]; then export SAMPLE=${SAMPLE-It was}; fi
if [[ -e $config ]]; then config=$(readlink -f "$config"); fi
cd "$root"
exec "$python" -m toolkit.launch --job.config_file "$config" ${COMM_MODE:+--comm.mode "$COMM_MODE"} "$@"
