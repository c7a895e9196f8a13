#!/usr/bin/env bash
# Runs on every node of a `ray up` or SkyPilot cluster, as its set-up command: afterwards `python`, `ray` and
# `horovod-tune` are on the login shell's PATH, in the tested versions, and Horovod is compiled.
#
#   bash node_setup.sh cpu     Horovod with Gloo
#   bash node_setup.sh nccl    Horovod with Gloo and NCCL (needs an NVIDIA driver; brings CUDA's compiler)
#   bash node_setup.sh tpu     no Horovod: torch_xla for TPU trials
#   bash node_setup.sh torch_tpu   no Horovod: TorchTPU for TPU trials, with Python 3.11 where python3 is older
#
# On a node that has all this (from an image, or an earlier `ray up`) nothing is installed or downloaded.
# The script adds up to two lines to ~/.bashrc, each at its top and at its end. The compiled wheel is cached in
# ~/.cache/horovod_tune.
set -euo pipefail

SRC=$HOME/.horovod-tune/src ENV=$HOME/.horovod-tune/env
TORCH=2.13.0 TORCH_XLA=2.9.0                      # torch_xla requires the torch of the same version
TORCH_TPU=0.2.0 PYTHON=python3 MINOR=10
CUDA=13.0 DRIVER=580                              # what that torch is built for, and the oldest driver for it
CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}   # torch without CUDA's gigabytes
RAY=$(sed -n 's/^ray==//p' "$SRC/constraints.txt")
kind=${1:-cpu}
case $kind in
  cpu|nccl) needs=horovod.torch ;;
  tpu) needs=torch_xla TORCH=$TORCH_XLA ;;
  torch_tpu) needs=torch_tpu MINOR=11 ;;
  *) echo "node_setup.sh: the kind must be cpu, nccl, tpu or torch_tpu, got '$kind'" >&2; exit 2 ;;
esac

complete() {  # does the Python $1 have all packages, in these versions?
  "$1" - "$RAY" "$TORCH" "$needs" "$kind" 2>/dev/null <<'P'
import importlib, sys
import ray, torch, horovod_tune
ray_version, torch_version, needs, kind = sys.argv[1:]
assert ray.__version__ == ray_version and torch.__version__.split("+")[0] == torch_version
module = importlib.import_module(needs)
assert kind != "nccl" or module.nccl_built()
P
}

login_line() {  # at the top, since many images' .bashrc returns early without a terminal, and at the end, since
  local others  # the lines of conda or pyenv may put their own Python first on the PATH
  others=$(grep -avxF "$1" ~/.bashrc 2>/dev/null || true)
  # Write the new file completely before its contents replace those of ~/.bashrc, which may be a link.
  printf '%s\n' "$1" "$others" "$1" > ~/.bashrc.new && cat ~/.bashrc.new > ~/.bashrc && rm ~/.bashrc.new
}

if [ -f ~/.ray/auth_token ]; then chmod 600 ~/.ray/auth_token; fi   # `ray get-auth-token --generate` leaves 644
login_line 'export RAY_AUTH_MODE=token'     # so that `ray status` and the like work when you log in
if [ -x "$ENV/bin/python" ]; then export PATH=$ENV/bin:$PATH; fi
if command -v python >/dev/null && complete python; then
  echo "horovod-tune: $(command -v python) has everything"; exit 0
fi

missing=()
if ! python3 -c "import sys; assert sys.version_info >= (3, $MINOR)" 2>/dev/null; then
  [ "$kind" = torch_tpu ] || { echo "node_setup.sh: needs Python 3.$MINOR or newer as python3" >&2; exit 1; }
  PYTHON=python3.$MINOR
fi
"$PYTHON" -c 'import ensurepip' 2>/dev/null || missing+=("$PYTHON-venv")
if [ "$needs" = horovod.torch ]; then
  command -v g++ >/dev/null || missing+=(g++)
  command -v make >/dev/null || missing+=(make)
  python3 -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
fi
if [ "${#missing[@]}" -gt 0 ]; then
  { sudo -n apt-get update -q && sudo -n apt-get install -y -q --no-install-recommends "${missing[@]}"; } ||
    { echo "node_setup.sh: this node lacks ${missing[*]} (Debian's names), and apt-get could not install them" >&2; exit 1; }
fi
[ -x "$ENV/bin/pip" ] || "$PYTHON" -m venv --clear "$ENV"
export PATH=$ENV/bin:$PATH
login_line "export PATH=$ENV/bin:\$PATH"

if [ "$kind" = nccl ]; then
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1) ||
    { echo "node_setup.sh: no NVIDIA driver here (nvidia-smi); use an image that has one, $DRIVER or newer" >&2; exit 1; }
  [ "${driver%%.*}" -ge "$DRIVER" ] ||
    { echo "node_setup.sh: driver $driver is too old for CUDA $CUDA of torch $TORCH: $DRIVER or newer is needed" >&2; exit 1; }
  if [ ! -x "/usr/local/cuda-$CUDA/bin/nvcc" ]; then      # even if the image has another CUDA
    . /etc/os-release
    deb=cuda-keyring_1.1-1_all.deb
    wget -q "https://developer.download.nvidia.com/compute/cuda/repos/${ID}${VERSION_ID//./}/x86_64/$deb" -O "/tmp/$deb"
    sudo dpkg -i "/tmp/$deb" && sudo apt-get update -q
    sudo apt-get install -y -q --no-install-recommends "cuda-minimal-build-${CUDA/./-}"
  fi
  export HOROVOD_CUDA_HOME=/usr/local/cuda-$CUDA
elif [ "$kind" = cpu ] || [ "$kind" = torch_tpu ]; then
  pip install --index-url "$CPU_INDEX" "torch==$TORCH" || pip install "torch==$TORCH"
fi

# The head needs the cloud SDKs, since its autoscaler starts and stops the machines.
pip install -c "$SRC/constraints.txt" "ray[default,tune]" "torch==$TORCH" boto3 google-api-python-client "$SRC"
case $kind in
  cpu) horovod-tune install-horovod ;;
  nccl) horovod-tune install-horovod --gpu nccl ;;
  tpu) pip install "torch_xla[tpu]==$TORCH_XLA" ;;
  torch_tpu) pip install "torch_tpu==$TORCH_TPU" "torch==$TORCH" ;;
esac
complete python || { echo "node_setup.sh: $ENV is incomplete; see above" >&2; exit 1; }
