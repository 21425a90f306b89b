"""
Does what the README tells a newcomer to do, on fresh minimal Debian systems.

    nox -s newcomer                                      # Debian 12 and 13, each in the foreground and in the background
    nox -s newcomer -- bookworm --background --again     # what .ci/run does, and:
    nox -s newcomer -- trixie --root --again

The lines of the README's first ``console`` block are read out of it and run in order by one shell of an ordinary user, in a Debian that
debootstrap made (``minbase``, and sudo) and a clean clone of HEAD. In the foreground they have a terminal, ``/sys``, and namespaces, as on
a machine. In the background nox's lines are started by ``nohup … &`` from a script, so they ignore interruptions, and there is no ``/sys``
and no namespace to be had, as in many containers. As root they run in a plain chroot, whose ``/`` is no mount.

Needs root and debootstrap. How this machine reaches its package indexes goes along: apt's archive and settings, proxies, certificates,
and pip's and uv's indexes; folders of this machine that pip looks into stay behind.

What is mounted is mounted in a namespace that ends with the last process in it, and nothing of this machine is bound into it, so that
removing a root can remove nothing else.
"""

import argparse
import configparser
import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Bases, roots while they are used, logs, and the names of the tests that were skipped.
PLACE = ROOT / ".nox" / "newcomer"

USER = "newcomer"
CHECKOUT = "sparkwright"
#: Debian 12 and 13.
RELEASES = ("bookworm", "trixie")
#: How the lines are run → what --help says.
MODES = {"foreground": "run the lines as typed, only", "background": "run nox under nohup, only", "root": "run them as root in a plain chroot, only"}
#: The line that is run with --build alone, and the one that --again repeats.
LONG, TESTS = "nox -s build", "nox -s tests"

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

#: Makes what a container engine makes, then ends as the shell of the user ends: ROOT MODE USER COMMAND.
MOUNTS = """
set -eu
root=$1 mode=$2 user=$3 command=$4
[[ $mode == root ]] || mount --bind "$root" "$root"
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


def lines(page: Path) -> list[str]:
    """Return the commands of the first ``console`` block of *page*, without their comments."""
    block = re.search(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert block, f"{page.name} has no console block"
    return [re.sub(r"\s+# .*", "", line[2:]).strip() for line in block[1].splitlines() if line.startswith("$ ")]


# What this machine has

def sources(suite: str = "") -> list[tuple[str, str]]:
    """Return the archives of *suite* (or this machine's own), its own first, as apt reaches those of this machine: address and release."""
    system = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text("utf-8").splitlines() if "=" in line)
    name = system.get("VERSION_CODENAME", "")
    if os.geteuid() != 0 or not shutil.which("debootstrap") or system.get("ID") != "debian":
        raise CannotRun("needs root, a Debian, whose archive and keys it uses, and: apt-get install debootstrap")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    rows = map(str.split, subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    suites = {f"{name}{kind}": f"{suite or name}{kind}" for kind in ("", "-updates", "-security")}
    found = {(row[0], suites[row[1]]) for row in rows if row[1:] in [[release, "main"] for release in suites]}
    if not any(release == (suite or name) for _, release in found):
        raise CannotRun(f"apt knows no archive of {name}; run apt-get update")
    return sorted(found, key=lambda one: (len(one[1]), one))


def pip_settings() -> dict[str, str]:
    """Return what pip's files of this user and machine say about reaching an index, without folders of this machine."""
    home = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    files = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", Path.home() / ".pip" / "pip.conf", home / "pip" / "pip.conf")
    read = configparser.RawConfigParser()
    read.read([*files, os.environ.get("PIP_CONFIG_FILE", os.devnull)], encoding="utf-8")
    return _elsewhere({key: value for section in read.sections() if section == "global" for key, value in read[section].items() if key in PIP})


def variables() -> dict[str, str]:
    """Return the variables that say how to reach an index."""
    return _elsewhere({name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)})


def _elsewhere(settings: Mapping[str, str]) -> dict[str, str]:
    """Return *settings* without the addresses of folders of this machine."""
    values = {name: " ".join(word for word in value.split() if not word.startswith("file:")) for name, value in settings.items()}
    return {name: value for name, value in values.items() if value}


# Bases

def contained(*command: str) -> list[str]:
    """Return a command that runs *command* with mounts and processes of its own; they end with it, and it with this process."""
    return ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", *command]


def debootstrap(root: Path, suite: str, *options: str) -> None:
    """Make a minimal *suite* in *root*, with how this machine's apt reaches its archive; *options* are debootstrap's."""
    # A debootstrap that is older than a release makes it as the one that is always in development.
    script = [] if Path("/usr/share/debootstrap/scripts", suite).exists() else ["/usr/share/debootstrap/scripts/sid"]
    command = contained("debootstrap", "--variant=minbase", *options, suite, str(root), sources(suite)[0][0], *script)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, errors="replace")
    if done.returncode:
        raise CannotRun(f"debootstrap {suite} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    reached = [line for line in dump.splitlines() if re.match(r"Acquire::(http|https|Check-|Retries)", line)]
    write(root / "etc" / "apt" / "apt.conf.d" / "99here", "".join(f"{line}\n" for line in reached))


def base(suite: str) -> Path:
    """Return an archive of a fresh minimal *suite* with an ordinary user who may use sudo; made anew once a week."""
    path = PLACE / f"{suite}.tar.gz"
    if path.exists() and time.time() - path.stat().st_mtime < BASE_AGE:
        return path
    with fresh(suite) as root:
        # An archive that is reached by HTTPS needs certificates before the README's first line.
        https = sources(suite)[0][0].startswith("https:")
        debootstrap(root, suite, "--include=sudo,ca-certificates" if https else "--include=sudo")
        subprocess.run(["chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
        write(root / "etc" / "sudoers.d" / USER, f"{USER} ALL=(ALL) NOPASSWD: ALL\n", 0o440)
        made = path.with_suffix(".made")
        # The first line of the README makes the lists; those of debootstrap are of the archive alone.
        subprocess.run(["tar", "-C", root, "--numeric-owner", "--exclude=./var/lib/apt/lists/*_*", "--exclude=*.deb", "-czf", made, "."], check=True)
        made.replace(path)
    return path


@contextlib.contextmanager
def fresh(name: str) -> Iterator[Path]:
    """Yield an empty folder for a root, which is removed at the end, whatever happens."""
    # Other users of this machine have no business with the set-user-ID programs and the settings in it.
    (PLACE / "roots").mkdir(mode=0o700, parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=PLACE / "roots"))
    root.chmod(0o755)
    try:
        yield root
    finally:
        remove(root)


def remove(root: Path) -> None:
    """Remove *root*; the last processes of a run that was stopped may still write for a moment."""
    # In a group of its own, a Ctrl-C at the terminal does not reach it.
    again = 'for _ in {1..20}; do rm -rf --one-file-system "$0" 2>/dev/null && exit; sleep 0.5; done; exit 1'
    subprocess.run(["bash", "-c", again, root], check=True, process_group=0)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write *text* to *path*, below a root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    path.chmod(mode)


# One run

def furnish(root: Path, suite: str, user: str, home: Path) -> None:
    """Give *root* what a container engine gives one, how this machine reaches its indexes, and the checkout in the *home* of *user*."""
    write(root / "etc" / "apt" / "sources.list", "".join(f"deb {address} {release} main\n" for address, release in sources(suite)))
    (root / "etc" / "resolv.conf").unlink(missing_ok=True)
    write(root / "etc" / "hosts", f"127.0.0.1 localhost {os.uname().nodename}\n::1 localhost\n")
    settings = pip_settings()
    write(root / "etc" / "pip.conf", "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    # Of certificates, the package ca-certificates makes the first, and takes up those in the second when it is installed.
    made, own = Path("/etc/ssl/certs/ca-certificates.crt"), Path("/usr/local/share/ca-certificates")
    named = {Path(value) for value in (*settings.values(), *variables().values()) if value.startswith("/")} - {made}
    for path in (*named, Path("/etc/resolv.conf"), Path("/etc/uv/uv.toml"), *own.rglob("*")):
        if path.is_file():
            (target := root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    checkout = home / CHECKOUT
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout], check=True)
    subprocess.run(["chroot", root, "chown", "-R", f"{user}:{user}", f"{checkout.relative_to(root)}"], check=True)


def script(told: Sequence[str], environment: Mapping[str, str], mode: str, *, again: bool) -> str:
    """Return what the user's shell does: the lines of the README, one after the other; it notes number, status and seconds of each."""
    parts = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    parts += [f"cd ~/{CHECKOUT} || exit"]
    for number, line in enumerate(told):
        parts += ["SECONDS=0", *step(line, mode, number)]
        if line == TESTS:
            # What was skipped here another machine may be asked for; a second run would write its own.
            parts += ["cp .pytest_cache/d/skipped/names ~/skipped"]
        if again and line == TESTS:
            parts += ["if [ $ended = 1 ]; then", *step(f"{TESTS} -- --last-failed --last-failed-no-failures none", mode, number), "fi"]
        parts += [f"echo {number} $ended $SECONDS >>~/results"]
        if not line.startswith("nox "):
            parts += ["[ $ended = 0 ] || exit 1"]
    return "\n".join([*parts, "echo; /usr/bin/python3 --version; g++ --version | head -n 1", ""])


def step(text: str, mode: str, number: int) -> list[str]:
    """Return how the shell runs the line *text*, as a person types it or as a script puts it into the background."""
    if mode != "background" or not text.startswith("nox "):
        return [f"{{ {text}", "}; ended=$?"]
    out = f"~/nohup-{number}.out"
    return [f": >{out}", f"nohup {text} >>{out} 2>&1 &", f"tail --lines=+1 --follow --pid=$! {out}", "wait $!; ended=$?"]


def run(suite: str, mode: str, told: Sequence[str], limit: int, *, again: bool) -> list[str]:
    """Run *told* in a fresh *suite*, and return number, status and seconds of each line that ended."""
    made = base(suite)
    log, skipped = PLACE / f"{suite}-{mode}.log", PLACE / f"{suite}-{mode}.skipped"
    skipped.unlink(missing_ok=True)
    with fresh(suite) as root:
        subprocess.run(["tar", "-C", root, "--numeric-owner", "-xzf", made], check=True)
        user, home = ("root", root / "root") if mode == "root" else (USER, root / "home" / USER)
        furnish(root, suite, user, home)
        write(home / "lines", script(told, variables(), mode, again=again))
        # A program in the foreground has a terminal, which `script` gives it.
        command = "bash lines" if mode != "foreground" else "script --quiet --return --command 'bash lines' /dev/null"
        whole = contained("bash", "-c", MOUNTS, "newcomer", str(root), mode, user, command)
        # In a session of its own: a signal to a group reaches neither this process from there nor that one from here.
        follow = ["timeout", str(limit), "bash", "-c", '"$@" 2>&1 | tee "$0"', str(log), *whole]
        # Nothing is typed, and nothing ends what could be.
        keyboard, _ = os.pipe()
        subprocess.run(follow, stdin=keyboard, cwd="/", check=False, start_new_session=True)
        results = home / "results"
        # The newcomer's folder is the newcomer's: a link there could name any file of this machine.
        if not any(path.is_symlink() for path in (home / "skipped", results, home, home.parent)):
            if (home / "skipped").is_file():
                shutil.copyfile(home / "skipped", skipped)
            return results.read_text("utf-8").splitlines() if results.is_file() else []
    return []


def main(words: Sequence[str]) -> int:
    """Run the lines as asked for, say what became of each, and return 0 if every line passed."""
    parser = argparse.ArgumentParser(prog="nox -s newcomer --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{' or '.join(RELEASES)} (both)")
    for mode, text in MODES.items():
        parser.add_argument(f"--{mode}", dest="modes", action="append_const", const=mode, help=text)
    parser.add_argument("--build", action="store_true", help="run the line of the build, too")
    parser.add_argument("--again", action="store_true", help="ask what failed once more; what then passes was the machine's doing")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="SECONDS", help=f"for all lines of a run but the build ({LIMIT})")
    parser.add_argument("--check", action="store_true", help="say whether this machine can do it, and do nothing")
    options = parser.parse_args(words)
    told = [line for line in lines(ROOT / "README.md") if line != LONG or options.build]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    rows = []
    try:
        sources()
        if options.check:
            return 0
        PLACE.mkdir(parents=True, exist_ok=True)
        with (PLACE / "lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for left in (PLACE / "roots").glob("*"):
                remove(left)
            for suite in options.suites or RELEASES:
                for mode in options.modes or MODES:
                    limit = BUILD_LIMIT if options.build else options.limit
                    ended = dict(row.split(" ", 1) for row in run(suite, mode, told, limit, again=options.again))
                    rows += [(suite, mode, line, *ended.get(str(number), "none 0").split()) for number, line in enumerate(told)]
    except CannotRun as error:
        sys.stdout.write(f"newcomer: {error}\n")
        return 1
    finally:
        # Distribution, mode, line, status and seconds; also of an interrupted run.
        sys.stdout.write("".join(f"{' | '.join(row)}\n" for row in rows))
    return int(any(row[3] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
