"""
Does what the README tells a newcomer to do, on fresh minimal Debian systems.

    nox -s newcomer                                      # Debian 12 and 13, each in the foreground and in the background
    nox -s newcomer -- bookworm --background --again     # what .ci/run does

The lines of the README's first ``console`` block are read out of it and run in order by one shell of an ordinary user, in a Debian that
debootstrap made (``minbase``, and sudo) and a clean clone of HEAD. In the foreground they have a terminal, ``/sys``, and namespaces, as on
a machine. In the background nox's lines are started by ``nohup … &`` from a script, so they ignore interruptions, and there is no ``/sys``
and no namespace to be had, as in many containers.

Needs root and debootstrap. How this machine reaches its package indexes goes along: apt's archive and settings, proxies, certificates,
and pip's and uv's indexes; folders of this machine that pip looks into stay behind.

What is mounted is mounted in a namespace that ends with the last process in it, and nothing of this machine is bound into it, so that
removing a root can remove nothing else.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
#: Bases, roots while they are used, logs, and the names of the tests that were skipped.
PLACE = ROOT / ".nox" / "newcomer"

USER = "newcomer"
CHECKOUT = "sparkwright"
#: Code name → what the table says.
RELEASES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
MODES = ("foreground", "background")
LONG = "nox -s build"
TESTS = "nox -s tests"

#: Seconds that a base is used for; packages are replaced meanwhile, and a newcomer has today's.
BASE_AGE = 7 * 24 * 3600
#: Seconds that all lines of one run may take together, without the build.
LIMIT = 5400
BUILD_LIMIT = 6 * 3600

#: Variables that say how to reach an index; those that name files are carried with the file.
CARRIED = re.compile(
    r"(?i)(https?|ftp|all|no)_proxy|(requests|curl)_ca_bundle|git_ssl_cainfo|ssl_cert_file|uv_.*index.*|sparkwright_index_url"
    r"|pip_((extra_)?index_url|proxy|(client_)?cert|trusted_host|(default_)?timeout|retries)"
)
#: Options of pip that say how to reach an index.
PIP = ("index-url", "extra-index-url", "proxy", "cert", "client-cert", "trusted-host", "timeout", "default-timeout", "retries")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

MARK = "@newcomer"
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")
SUMMARY = re.compile(r"^=+ ((?:\d+ \w+(?:, )?)+) in [\d.]+s.*=+$", re.MULTILINE)

#: Makes what a container engine makes, then ends as the shell of the user ends: ROOT MODE USER COMMAND.
MOUNTS = """
set -eu
root=$1 mode=$2 user=$3 command=$4
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    read -r name major minor <<<"$device"
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
apart=(chroot "$root")
if [[ $mode == foreground ]]; then
    mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
    # Who is in a changed root gets no namespaces from the kernel; a root that was swapped is as good as the machine's own.
    cd "$root"
    pivot_root . mnt
    umount --lazy /mnt
    apart=()
fi
# This shell stays the first process: it collects the children that others leave behind.
ended=0
"${apart[@]}" env -i TERM=xterm PATH=/usr/sbin:/usr/bin:/sbin:/bin su --login "$user" --command "$command" || ended=$?
exit "$ended"
"""


class CannotRun(Exception):
    """This machine cannot make a Debian, or one could not be made."""


@dataclasses.dataclass
class Line:
    """A line of the README: its *text*, and what became of it in one run."""

    text: str
    result: str = "not run"
    seconds: float = 0.0
    summaries: list[str] = dataclasses.field(default_factory=list)

    @property
    def told(self) -> str:
        """Return the line as the table shows it."""
        return f"{self.text:.60}…" if len(self.text) > 61 else self.text


def say(text: str) -> None:
    """Print *text* now; hours may pass until the next."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def lines(page: Path) -> list[str]:
    """Return the commands of the first ``console`` block of *page*, without their comments."""
    block = re.search(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if block is None:
        raise CannotRun(f"{page.name} has no console block")
    return [re.sub(r"\s+# .*", "", line[2:]).strip() for line in block[1].splitlines() if line.startswith("$ ")]


# What this machine has

def archives() -> tuple[str, list[tuple[str, str, str]]]:
    """Return the code name of this machine's Debian, and its archives as apt knows them: address, release, component."""
    system = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text("utf-8").splitlines() if "=" in line)
    name = system.get("VERSION_CODENAME", "").strip('"')
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise CannotRun("needs root, and: apt-get install debootstrap")
    if system.get("ID") != "debian":
        raise CannotRun("needs a Debian, whose archive and keys it uses")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [(words[0], words[1], words[2]) for words in map(str.split, told.splitlines()) if len(words) == 3]
    if not any(release == name and component == "main" for _, release, component in found):
        raise CannotRun(f"apt knows no archive of {name}")
    return name, found


def sources(suite: str) -> list[tuple[str, str]]:
    """Return the archives of *suite*, its own first, as this machine reaches those of its own Debian: address and release."""
    name, known = archives()
    releases = {name: suite, f"{name}-updates": f"{suite}-updates", f"{name}-security": f"{suite}-security"}
    found = {(address, releases[release]) for address, release, component in known if release in releases and component == "main"}
    return sorted(found, key=lambda one: (len(one[1]), one))


def pip_settings() -> dict[str, str]:
    """Return what pip's files of this user and machine say about reaching an index."""
    home = Path.home()
    places = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip" / "pip.conf"]
    places.append(Path(os.environ.get("XDG_CONFIG_HOME", home / ".config")) / "pip" / "pip.conf")
    if own := os.environ.get("PIP_CONFIG_FILE"):
        places.append(Path(own))
    read = configparser.RawConfigParser()
    read.read(places, encoding="utf-8")
    settings = dict(read["global"]) if read.has_section("global") else {}
    return {key: value for key in PIP if (value := elsewhere(settings.get(key, "")))}


def variables() -> dict[str, str]:
    """Return the variables that say how to reach an index."""
    found = {name: elsewhere(value) for name, value in os.environ.items() if CARRIED.fullmatch(name)}
    return {name: value for name, value in found.items() if value}


def elsewhere(value: str) -> str:
    """Return *value* without the addresses of folders of this machine."""
    return " ".join(word for word in value.split() if not word.startswith("file:"))


# Bases

def contained(*command: str) -> list[str]:
    """Return a command that runs *command* with mounts and processes of its own; they end with it, and it with this process."""
    return ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", *command]


def base(suite: str) -> Path:
    """Return an archive of a fresh minimal *suite* with an ordinary user who may use sudo; made anew once a week."""
    path = PLACE / f"{suite}.tar.gz"
    if path.exists() and time.time() - path.stat().st_mtime < BASE_AGE:
        return path
    with fresh(suite) as root:
        address, _ = sources(suite)[0]
        # A debootstrap that is older than a release makes it as the one that is always in development.
        script = [] if Path("/usr/share/debootstrap/scripts", suite).exists() else ["/usr/share/debootstrap/scripts/sid"]
        # An archive that is reached by HTTPS needs certificates before the README's first line.
        include = "sudo,ca-certificates" if address.startswith("https:") else "sudo"
        command = contained("debootstrap", "--variant=minbase", f"--include={include}", suite, str(root), address, *script)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, errors="replace")
        if done.returncode:
            raise CannotRun(f"debootstrap {suite} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        for kept in (root / "var" / "cache" / "apt" / "archives").glob("*.deb"):
            kept.unlink()
        subprocess.run(["chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
        write(root / "etc" / "sudoers.d" / USER, f"{USER} ALL=(ALL) NOPASSWD: ALL\n", 0o440)
        # The first line of the README makes the lists; those of debootstrap are of the archive alone.
        for kept in (root / "var" / "lib" / "apt" / "lists").glob("*_*"):
            kept.unlink()
        made = path.with_suffix(".made")
        subprocess.run(["tar", "-C", root, "--numeric-owner", "-czf", made, "."], check=True)
        made.replace(path)
    return path


@contextlib.contextmanager
def fresh(name: str) -> Iterator[Path]:
    """Yield an empty folder for a root, which is removed at the end, whatever happens."""
    (PLACE / "roots").mkdir(parents=True, exist_ok=True)
    # Other users of this machine have no business with the set-user-ID programs and the settings in it.
    (PLACE / "roots").chmod(0o700)
    root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=PLACE / "roots"))
    root.chmod(0o755)
    try:
        yield root
    finally:
        remove(root)


def remove(root: Path) -> None:
    """Remove *root*; nothing may be mounted in it here, and what is mounted elsewhere is not reached from here."""
    rows = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    mounted = [re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), row.split()[4]) for row in rows]
    real = os.path.realpath(root)
    if any(point == real or point.startswith(f"{real}/") for point in mounted):
        raise CannotRun(f"something is mounted in {root}; it is left as it is")
    # The last processes of a run that was stopped may still write for a moment.
    for _ in range(20):
        # In a group of its own, a Ctrl-C at the terminal does not reach it.
        done = subprocess.run(["rm", "-rf", "--one-file-system", root], check=False, stderr=subprocess.DEVNULL, process_group=0)
        if done.returncode == 0:
            return
        time.sleep(0.5)
    raise CannotRun(f"{root} could not be removed")


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write *text* to *path*, below a root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    path.chmod(mode)


# One run

def furnish(root: Path, suite: str) -> None:
    """Give *root* what a container engine gives one, how this machine reaches its indexes, and the checkout."""
    write(root / "etc" / "apt" / "sources.list", "".join(f"deb {address} {release} main\n" for address, release in sources(suite)))
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    reached = [line for line in dump.splitlines() if re.match(r"Acquire::(http|https|Check-|Retries)", line)]
    write(root / "etc" / "apt" / "apt.conf.d" / "99here", "".join(f"{line}\n" for line in reached))
    (root / "etc" / "resolv.conf").unlink(missing_ok=True)
    write(root / "etc" / "resolv.conf", Path("/etc/resolv.conf").read_text("utf-8"))
    name = (root / "etc" / "hostname").read_text("utf-8").strip() if (root / "etc" / "hostname").exists() else os.uname().nodename
    write(root / "etc" / "hosts", f"127.0.0.1 localhost {name} {os.uname().nodename}\n::1 localhost\n")
    own = Path("/usr/local/share/ca-certificates")
    if own.is_dir():
        # The package ca-certificates takes them up when it is installed.
        shutil.copytree(own, root / own.relative_to("/"), dirs_exist_ok=True)
    settings, named = pip_settings(), variables()
    for value in (*settings.values(), *named.values()):
        carry(root, value)
    if settings:
        write(root / "etc" / "pip.conf", "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    if (configured := Path("/etc/uv/uv.toml")).exists():
        write(root / "etc" / "uv" / "uv.toml", configured.read_text("utf-8"))
    checkout = root / "home" / USER / CHECKOUT
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout], check=True)
    subprocess.run(["chroot", root, "chown", "-R", f"{USER}:{USER}", f"{checkout.relative_to(root)}"], check=True)


def carry(root: Path, value: str) -> None:
    """Copy the file that *value* names to its place in *root*, unless it is the one that Debian makes itself."""
    path = Path(value)
    if path.is_absolute() and path.is_file() and path != Path("/etc/ssl/certs/ca-certificates.crt"):
        (root / value.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / value.lstrip("/"))


def script(told: Sequence[Line], environment: Mapping[str, str], mode: str, *, again: bool) -> str:
    """Return what the user's shell does: the lines of the README, each between two marks, one after the other."""
    parts = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    parts += [f"cd ~/{CHECKOUT} || exit"]
    for number, line in enumerate(told):
        if line.result == "skip":
            continue
        parts += [f"printf '\\n{MARK} begin %s\\n' {number}", *step(line.text, mode, number)]
        if line.text.startswith(TESTS):
            # What was skipped here another machine may be asked for; a second run would write its own.
            parts += ["cp .pytest_cache/d/skipped/names ~/skipped"]
        if again and line.text.startswith(TESTS):
            parts += ["if [ $ended = 1 ]; then", *step(f"{TESTS} -- --last-failed --last-failed-no-failures none", mode, number), "fi"]
        parts += [f"printf '\\n{MARK} end %s %s\\n' {number} $ended"]
        if not line.text.startswith("nox "):
            parts += ["[ $ended = 0 ] || exit 1"]
    parts += [f'printf "\\n{MARK} has %s, %s\\n" "$(/usr/bin/python3 --version)" "g++ $(g++ -dumpfullversion)"', ""]
    return "\n".join(parts)


def step(text: str, mode: str, number: int) -> list[str]:
    """Return how the shell runs the line *text*, as a person types it or as a script puts it into the background."""
    if mode == "foreground" or not text.startswith("nox "):
        return [f"{{ {text}", "}; ended=$?"]
    out = f"~/nohup-{number}.out"
    return [f": >{out}", f"nohup {text} >>{out} 2>&1 &", f"tail --lines=+1 --follow --pid=$! {out}", "wait $!; ended=$?"]


def run(suite: str, mode: str, told: list[Line], options: argparse.Namespace) -> str:
    """Run *told* in a fresh *suite*, fill in what became of each, and return what compilers the newcomer had."""
    made = base(suite)
    log, skipped = PLACE / f"{suite}-{mode}.log", PLACE / f"{suite}-{mode}.skipped"
    skipped.unlink(missing_ok=True)
    with fresh(suite) as root:
        subprocess.run(["tar", "-C", root, "--numeric-owner", "-xzf", made], check=True)
        furnish(root, suite)
        home = root / "home" / USER
        write(home / "lines", script(told, variables(), mode, again=options.again))
        # A program in the foreground has a terminal, which `script` gives it.
        command = "bash lines" if mode == "background" else "script --quiet --return --command 'bash lines' /dev/null"
        whole = contained("bash", "-c", MOUNTS, "newcomer", str(root), mode, USER, command)
        has = follow(whole, log, told, BUILD_LIMIT if options.build else options.limit)
        # The newcomer's folder is the newcomer's: a link there could name any file of this machine.
        if (listed := home / "skipped").is_file() and not any(path.is_symlink() for path in (listed, home, home.parent)):
            shutil.copyfile(listed, skipped, follow_symlinks=False)
        if options.keep:
            (PLACE / "kept").mkdir(mode=0o700, exist_ok=True)
            target = PLACE / "kept" / f"{suite}-{mode}"
            if target.exists():
                remove(target)
            root.rename(target)
            say(f"kept: {target}")
    return has


def follow(command: list[str], log: Path, told: list[Line], limit: int) -> str:
    """Run *command*, show and keep what it prints, and fill in what the marks say about each line."""
    has, began = "", 0.0
    current: Line | None = None
    text: list[str] = []
    # A session of its own: a signal to a group reaches neither this process from there nor that one from here.
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=same, cwd="/", start_new_session=True)
    timer = threading.Timer(limit, child.kill)
    timer.start()
    try:
        assert child.stdout
        with log.open("w", encoding="utf-8") as kept:
            for raw in child.stdout:
                # What a terminal would show in the end of a line that was written over and over.
                row = ESCAPES.sub("", raw.decode("utf-8", "replace")).rstrip("\r\n").rpartition("\r")[2]
                kept.write(f"{row}\n")
                kept.flush()
                say(row)
                match row.split(" ", 3):
                    case [mark, "begin", number] if mark == MARK:
                        current, began, text = told[int(number)], time.monotonic(), []
                        current.result = "did not end"
                    case [mark, "end", number, ended] if mark == MARK and current:
                        current.result = "passed" if ended == "0" else f"FAILED, exit {ended}"
                        current.seconds, current.summaries = time.monotonic() - began, SUMMARY.findall("\n".join(text))
                        current = None
                    case [mark, "has", *what] if mark == MARK:
                        has = " ".join(what)
                    case _:
                        text.append(row)
        child.wait()
        if current:
            current.seconds = time.monotonic() - began
            if timer.finished.is_set():
                current.result = f"did not end (all lines had {limit} s)"
    finally:
        timer.cancel()
        child.kill()
        child.wait()
    return has


# The table

def table(rows: list[tuple[str, str, list[Line]]]) -> str:
    """Return what became of each line, for each distribution and mode."""
    cells = [("distribution", "mode", "line", "result", "min:s", "pytest")]
    for name, mode, told in rows:
        for line in told:
            spent = f"{int(line.seconds) // 60}:{int(line.seconds) % 60:02}" if line.seconds else ""
            result = "not run here (an hour and more; ask with -- --build)" if line.result == "skip" else line.result
            cells.append((name, mode, line.told, result, spent, "; again: ".join(line.summaries)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    made = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([made[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *made[1:]])


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(prog="nox -s newcomer --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{' or '.join(RELEASES)} (both)")
    parser.add_argument("--foreground", dest="modes", action="append_const", const="foreground", help="run the lines as typed, only")
    parser.add_argument("--background", dest="modes", action="append_const", const="background", help="run nox under nohup, only")
    parser.add_argument("--build", action="store_true", help="run the line of the build, too")
    parser.add_argument("--again", action="store_true", help="ask what failed once more; what then passes was the machine's doing")
    parser.add_argument("--keep", action="store_true", help="keep each root (what is mounted in it is not kept)")
    parser.add_argument("--tests", metavar="ARGUMENTS", default="", help="what the tests get behind --, for work on this session")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="SECONDS", help=f"for all lines of a run but the build ({LIMIT})")
    parser.add_argument("--check", action="store_true", help="say whether this machine can do it, and do nothing")
    return parser


def planned(options: argparse.Namespace) -> list[Line]:
    """Return the README's lines as this run takes them."""
    told = [Line(text) for text in lines(ROOT / "README.md")]
    for line in told:
        if line.text == LONG and not options.build:
            line.result = "skip"
        if line.text == TESTS and options.tests:
            line.text += f" -- {options.tests}"
    return told


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Allow one run of this checkout at a time, and remove the roots that a killed run left."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun("another run of this checkout is under way") from None
        for left in (PLACE / "roots").glob("*"):
            remove(left)
        yield


def stop(number: int, frame: FrameType | None) -> None:
    """End as after an interruption, so that what was made is removed; a second signal does not stop that."""
    for known in SIGNALS:
        signal.signal(known, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(words: Sequence[str]) -> int:
    """Run the lines as asked for, print the table, and return 0 if every line passed."""
    options = arguments().parse_args(words)
    if unknown := set(options.suites) - set(RELEASES):
        arguments().error(f"no Debian that is known here: {', '.join(sorted(unknown))}")
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup left it
            signal.signal(number, stop)
    rows: list[tuple[str, str, list[Line]]] = []
    try:
        archives()
        if options.check:
            return 0
        with alone():
            for suite in options.suites or RELEASES:
                for mode in options.modes or MODES:
                    told = planned(options)
                    rows.append((RELEASES[suite], mode, told))
                    say(f"==> {RELEASES[suite]}, {mode}")
                    has = run(suite, mode, told, options)
                    rows[-1] = (f"{RELEASES[suite]} ({has})" if has else RELEASES[suite], mode, told)
    except CannotRun as error:
        say(f"newcomer: {error}")
        return 1
    finally:
        if rows:
            say(f"\n{table(rows)}\n")
    return int(any(line.result not in ("passed", "skip") for _, _, told in rows for line in told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
