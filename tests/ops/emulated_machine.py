"""Run a command of this checkout on an emulated x86 machine: a real Linux kernel in Bochs.

    python -m tests.ops.emulated_machine [OPTIONS] -- python -m pytest tests/ops/test_cpu_linear.py

It can run instruction sets that this processor lacks. The machine has this Python with its
packages, this checkout with its built kernel library, no network, and a disk that is reset at each
start. The output of the command is shown while it runs, and its exit status becomes the exit status
of this program.

The following Debian packages are needed: `bochs` 3.0 or newer with `bochs-term` and `bochsbios`,
`grub-pc-bin` and `grub-common` (grub-mkrescue), `xorriso`, `mtools`, `cpio`, `busybox-static`, and
a kernel for x86-64 of 5.16 or newer with its modules, installed or unpacked (`--kernel-root`).

Linux starts in a minute, and `import torch` takes two; the clock of the machine is slower than
real time. Python and its packages are copied into an image of some gigabytes, which is kept in
`--folder`.

Bochs 3.0 cannot run `amx` correctly, so AMX is left out unless `--exclude` says otherwise. Before
that, these faults must be corrected in the source of Bochs, except the fourth:
- It has no XFD, without which Linux gives no tiles to processes. This includes the registers 0x1c4
  and 0x1c5, bit 4 of EAX of CPUID leaf 0xd.1, bit 2 of ECX of CPUID leaf 0xd.18, and the exception
  #NM at instructions that use the data of tiles.
- XSAVE exchanges the rows and the bytes in the configuration of a tile, writes half of the rows of
  its data, and treats tiles in use as unused. XRSTOR of the compact form computes a wrong position
  of a component after another component that is in the image but was not requested.
- Products of bytes treat signed bytes as unsigned.
- VCVTNE2PS2BF16 (AVX512-BF16) takes both halves from its second operand. So attention in bf16 gives
  wrong results on `avx512_bf16` and the instruction sets above it, and `amx` gives the results of
  `amx_portable`.
- Decoded instructions remain in the instruction cache when their code is overwritten. The reason is
  AMX_OK, bit 7 of the value that selects a cache entry: it moves the entry out of the 128 entries
  that are searched.
"""

import argparse
import gzip
import lzma
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Kernel modules of the disks, in the order in which they are loaded. A module that is built into
# the kernel has no file.
MODULES = ("scsi_common", "scsi_mod", "libata", "ata_piix", "cdrom", "sr_mod", "isofs", "overlay")
BUSYBOX, LOADER = Path("/bin/busybox"), Path("/lib64/ld-linux-x86-64.so.2")
FOLDERS = ("proc", "sys", "dev", "checkout", "system", "written", "new")
EXCLUDED = "la57 cet uintr amx amx_int8 amx_bf16"
STATUS = re.compile(r"^emulated_machine: exit status (\d+)\s*$", re.MULTILINE)

# The first process. The first disk has the checkout, the second has the system; nothing is written
# to either.
INIT = """#!/bin/busybox sh
PATH=/bin
/bin/busybox --install /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod $module; done
until [ -b /dev/sr1 ]; do sleep 0.1; done
mount -t iso9660 -o ro /dev/sr0 /checkout; mount -t iso9660 -o ro /dev/sr1 /system
mount -t tmpfs -o size=75% tmpfs /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/checkout:/system,upperdir=/written/upper,workdir=/written/work \
    overlay /new
for folder in proc sys dev; do mkdir -p /new/$folder; mount --move /$folder /new/$folder; done
mkdir -p /new/tmp /new/root /new/dev/shm; ln -s /proc/self/fd /new/dev/fd
exec switch_root /new /bin/busybox sh /run.sh
"""
RUN = """
export {}
cd {}
{}
echo "emulated_machine: exit status $?"
sync; sleep 1; poweroff -f
"""
GRUB = """
linux /boot/vmlinuz console=ttyS0 loglevel=4 tsc=reliable mitigations=off nokaslr {options}
initrd /boot/initrd
boot
"""
BOCHS = """
config_interface: textconfig
display_library: {display}
cpu: model={cpu}, count={processors}, ips=50000000, reset_on_triple_fault=0{features}
memory: guest=2048, host=2048
romimage: file="{share}/BIOS-bochs-latest", options=fastboot
vgaromimage: file="{share}/{vga}"
ata0-master: type=cdrom, path="{folder}/checkout.iso", status=inserted
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata1-master: type=cdrom, path="{folder}/system.iso", status=inserted
boot: cdrom
clock: sync=none
com1: enabled=1, mode=file, dev="{folder}/console"
log: "{folder}/bochs.log"
panic: action=fatal
error: action=ignore
"""


def write_iso(target: Path, program: list[str], files: dict[Path, Path]) -> None:
    """Make an image with these files and folders, by their paths in it."""
    pairs = [[str(path).replace("=", "\\=") for path in pair] for pair in files.items()]
    command = [*program, "-o", str(target), *map("=".join, pairs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        target.unlink(missing_ok=True)
        raise SystemExit(f"{program[0]} failed:\n{done.stderr[-2000:]}")


def system_files() -> dict[Path, Path]:
    """Return this Python, its packages, and the libraries of the system that they load."""
    code = "import ctypes, multiprocessing, numpy, pytest, sqlite3, ssl, torch"
    code += "; print(open('/proc/self/maps').read())"
    maps = subprocess.check_output([sys.executable, "-c", code], text=True)
    loaded = {Path(path) for path in re.findall(r" (/\S+)$", maps, re.MULTILINE)}
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")}
    if sys.prefix != sys.base_prefix:
        folders.add(Path(sys.prefix))
    executable = Path(sys.executable).resolve()
    paths = {*folders, executable, *loaded}
    for path in (executable, *loaded):  # also the symbolic links by which these files are found
        paths |= {p for p in path.parent.iterdir() if p.is_symlink() and p.resolve() == path}
    outermost = {path for path in paths if not any(folder in path.parents for folder in folders)}
    return {path: path for path in outermost} | {LOADER: LOADER.resolve(), BUSYBOX: BUSYBOX}


def checkout_files() -> dict[Path, Path]:
    """Return the files that git knows or does not ignore, and the kernel library."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    paths = [*(ROOT / name for name in listed.split("\0") if name), *ROOT.glob("vllm/ops/*.so")]
    return {path: path for path in paths if path.is_file()}


def find_kernel(root: Path) -> tuple[Path, Path]:
    """Return the newest kernel below this folder, and the folder of its modules."""
    for kernel in sorted(root.glob("boot/vmlinuz-*"), reverse=True):
        version = kernel.name.removeprefix("vmlinuz-")
        for modules in (root / "lib/modules" / version, root / "usr/lib/modules" / version):
            if modules.is_dir():
                return kernel, modules
    raise SystemExit(f"--kernel-root {root}: there is no boot/vmlinuz-* with its modules")


def unpacked(module: Path) -> bytes:
    """Return a module of the kernel, which may be compressed."""
    data = module.read_bytes()
    if module.suffix == ".zst":
        return subprocess.check_output(["zstd", "-dc"], input=data)
    return {".xz": lzma.decompress, ".gz": gzip.decompress}.get(module.suffix, bytes)(data)


def write_initrd(target: Path, modules: Path) -> None:
    """Write the file system in which the machine starts: busybox, and the kernel modules that the
    disks need.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("bin", "modules", *FOLDERS):
            (folder / name).mkdir()
        shutil.copy(BUSYBOX, folder / "bin" / "busybox")
        for number, name in enumerate(MODULES):
            for module in modules.glob(f"kernel/**/{name}.ko*"):
                (folder / "modules" / f"{number}-{name}.ko").write_bytes(unpacked(module))
        (folder / "init").write_text(INIT)
        (folder / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")))
        command = ["cpio", "--create", "--format=newc", "--quiet"]
        image = subprocess.check_output(command, cwd=folder, input=names.encode())
        target.write_bytes(gzip.compress(image))


def write_images(options: argparse.Namespace, folder: Path) -> None:
    """Write everything that Bochs reads."""
    kernel, modules = find_kernel(options.kernel_root)
    path = f"PATH={Path(sys.executable).parent}:/bin"
    environment = [path, f"PYTHONPATH={ROOT}", "HOME=/root", "USER=root", "LANG=C.UTF-8"]
    words = shlex.join([*environment, *options.env]), shlex.quote(str(ROOT))
    run = RUN.format(*words, shlex.join(options.command))
    features = f', exclude_features="{options.exclude}"' if options.exclude else ""
    share = Path(os.environ.get("BXSHARE", "/usr/share/bochs"))
    # Debian's file has no .bin at the end of its name
    vga = min(path.name for path in share.glob("VGABIOS-lgpl-latest*"))
    values = {**vars(options), "folder": folder, "features": features, "share": share, "vga": vga}
    (folder / "run.sh").write_text(run)
    (folder / "grub.cfg").write_text(GRUB.format(options=options.kernel_options))
    (folder / "bochsrc").write_text(BOCHS.format(**values))
    write_initrd(folder / "initrd", modules)
    if not (folder / "system.iso").exists():
        xorriso = ["xorriso", "-as", "mkisofs", "-R", "-graft-points"]
        write_iso(folder / "system.iso", xorriso, system_files())
    boot = {"boot/vmlinuz": kernel, "boot/initrd": folder / "initrd"}
    boot |= {"boot/grub/grub.cfg": folder / "grub.cfg", "run.sh": folder / "run.sh"}
    files = {Path("/", name): source for name, source in boot.items()} | checkout_files()
    write_iso(folder / "checkout.iso", ["grub-mkrescue"], files)


def run_machine(bochs: str, folder: Path) -> int:
    """Run the machine until it powers off. Return the exit status of the command; 125: there is
    none.
    """
    console = folder / "console"
    console.write_bytes(b"")
    # The display `term` of Bochs needs a terminal; nothing of it is shown.
    screen, terminal = pty.openpty()
    command = ["env", "TERM=linux", *shlex.split(bochs), "-q", "-f", str(folder / "bochsrc")]
    machine = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.set_blocking(screen, False)
    written, shown, is_over = b"", b"", False
    try:
        while not is_over:
            is_over = machine.poll() is not None or b"Kernel panic" in written
            new = console.read_bytes()[len(written) :]
            written += new
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
            try:
                shown = shown[-1000:] + os.read(screen, 1 << 16)
            except OSError:  # nothing can be read yet, or the other end is closed
                time.sleep(0.5)
    finally:
        machine.kill()
        os.close(screen)
    found = STATUS.findall(written.decode(errors="replace"))
    if not found:
        print(shown.decode(errors="replace"), file=sys.stderr)
        print(f"The machine stopped too early: see {folder / 'bochs.log'}", file=sys.stderr)
    return int(found[-1]) if found else 125


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cpu", default="sapphire_rapids", help="a name of `bochs --help cpu`")
    add("--exclude", default=EXCLUDED, help="features that the processor lacks: %(default)s")
    add("--processors", type=int, default=1)
    add("--kernel-root", type=Path, default=Path("/"), help="the folder with boot/vmlinuz-*")
    add("--kernel-options", default="", help="more of the kernel's command line")
    add("--bochs", default="bochs", help="the command that starts Bochs")
    add("--display", default="term", help="a display that this Bochs has, such as nogui")
    add("--folder", type=Path, help="for images, kept for the next run; otherwise a temporary one")
    add("--env", action="append", default=[], metavar="NAME=VALUE")
    add("command", nargs="+")
    options = parser.parse_args()
    # Exit normally, so that Bochs is stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_images(options, folder)
        return run_machine(options.bochs, folder)


if __name__ == "__main__":
    sys.exit(main())
