"""The systemd units of a runner; `systemd.exec(5)` and `systemd.resource-control(5)` are the sources of every word in them."""

from __future__ import annotations

import textwrap

from sparkwright.operate.runner.policy import Policy

#: The template; its instance is only a name.
SERVICE = "sparkwright-runner@.service"
INSTANCE = "sparkwright-runner@spark.service"
EGRESS = "sparkwright-runner-egress"
CREDENTIAL = "github-token"

#: What a job could rule the machine by; a missing one is no error ("-").
CLOSED = (
    "/run/docker.sock", "/var/run/docker.sock", "/run/docker", "/run/containerd", "/run/podman", "/run/crio", "/run/libvirt",
    "/run/dbus/system_bus_socket", "/run/systemd/private", "/run/snapd.socket", "/var/spool/cron", "/var/lib/systemd/linger",
)  # fmt: skip
#: What the supervisor needs to become the job's user, end its processes and remove its files; the job itself gets none of it.
CAPABILITIES = "CAP_SETUID CAP_SETGID CAP_SETPCAP CAP_KILL CAP_CHOWN CAP_FOWNER CAP_DAC_OVERRIDE CAP_LINUX_IMMUTABLE CAP_IPC_OWNER"


def escaped(path: str) -> str:
    """Return *path* as the name of a unit (`systemd-escape --path`)."""
    name = path.strip("/")
    kept = [letter if letter.isascii() and (letter.isalnum() or letter in "_.") else _code(letter) for letter in name]
    return "".join("-" if letter == "/" else sign for letter, sign in zip(name, kept, strict=True))


def _code(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode())


def mount(policy: Policy) -> tuple[str, str]:
    """Return name and text of the unit that mounts the work folder: no device, no set-user-id, nothing beyond its size."""
    name = f"{escaped(policy.folders.work)}.mount"
    return name, _text(f"""
        [Unit]
        Description=All that a job of sparkwright can write to

        [Mount]
        What={image(policy)}
        Where={policy.folders.work}
        Type=ext4
        Options=loop,nodev,nosuid,noatime

        [Install]
        WantedBy=multi-user.target
        """)


def image(policy: Policy) -> str:
    """Return the file that holds the work folder's file system."""
    return f"{policy.folders.state}/work.img"


def service(policy: Policy) -> str:
    """
    Return the template that runs one job after the other, each from a clean state.

    The main process is root's, with few capabilities, and reads the token; the job is started by it under the user of the policy, inside
    the same cage. RuntimeMaxSec is the last resort: `once` ends a job earlier, and says why.
    """
    folders, limits = policy.folders, policy.limits
    program = f"{folders.program}/bin/sparkwright"
    longest = round(60 * (limits.job + limits.idle) + 60 * policy.registration + 900)
    return _text(f"""
        [Unit]
        Description=One job of a repository on this Spark, and its clean-up (%i)
        Wants=network-online.target
        After=network-online.target {EGRESS}.service
        Requires={EGRESS}.service
        RequiresMountsFor={folders.work}
        StartLimitIntervalSec=0

        [Service]
        Type=exec
        ExecStartPre=+/usr/sbin/sysctl --quiet kernel.dmesg_restrict=0
        ExecStart={program} lab runner once --config {folders.config}
        ExecStopPost={program} lab runner clean --config {folders.config}
        SuccessExitStatus=130
        Restart=always
        RestartSec=10
        RuntimeMaxSec={longest}
        TimeoutStopSec={round(limits.stop) + 100}
        KillMode=control-group
        LoadCredential={CREDENTIAL}:{folders.config}/{CREDENTIAL}
        UMask=0077
        # the job's cage
        NoNewPrivileges=yes
        CapabilityBoundingSet={CAPABILITIES}
        ProtectSystem=strict
        ReadWritePaths={folders.state} {folders.work}
        BindReadOnlyPaths={folders.models}
        InaccessiblePaths={" ".join(f"-{path}" for path in CLOSED)}
        ProtectHome=yes
        PrivateTmp=yes
        PrivateIPC=yes
        ProtectKernelTunables=yes
        ProtectKernelModules=yes
        # G7 of a job reads the kernel's log for errors of the GPU (dmesg_restrict=0 opens it to users)
        ProtectKernelLogs=no
        ProtectControlGroups=yes
        ProtectClock=yes
        ProtectHostname=yes
        ProtectProc=default
        RestrictSUIDSGID=yes
        RestrictRealtime=yes
        # builds of this project keep themselves from the network by namespaces of their own
        RestrictNamespaces=user net mnt pid ipc uts
        RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
        LockPersonality=yes
        SystemCallArchitectures=native
        SystemCallFilter=~@clock @cpu-emulation @module @obsolete @raw-io @reboot @swap
        SystemCallErrorNumber=EPERM
        DevicePolicy=closed
        DeviceAllow=char-nvidia* rw
        DeviceAllow=/dev/kmsg r
        MemoryAccounting=yes
        MemoryHigh={limits.memory_high}
        MemoryMax={limits.memory_max}
        TasksMax={limits.tasks}
        OOMPolicy=continue

        [Install]
        WantedBy=multi-user.target
        """)


def egress_service(policy: Policy) -> str:
    """Return the unit that loads the rules at boot, before there is a network."""
    folders = policy.folders
    return _text(f"""
        [Unit]
        Description=Where jobs of sparkwright may connect to
        Before=network-pre.target
        Wants=network-pre.target

        [Service]
        Type=oneshot
        RemainAfterExit=yes
        ExecStart=/usr/sbin/nft -f {folders.config}/egress.nft
        # A restart would end the runner, which requires this unit, in the middle of a job.
        ExecReload=/usr/sbin/nft -f {folders.config}/egress.nft

        [Install]
        WantedBy=multi-user.target
        """)


def refresh_service(policy: Policy) -> str:
    """Return the unit that the timer starts."""
    folders = policy.folders
    return _text(f"""
        [Unit]
        Description=Renew the addresses that jobs of sparkwright may connect to
        After={EGRESS}.service network-online.target
        Requires={EGRESS}.service

        [Service]
        Type=oneshot
        ExecStart={folders.program}/bin/sparkwright lab runner egress --config {folders.config}
        CapabilityBoundingSet=CAP_NET_ADMIN
        NoNewPrivileges=yes
        ProtectSystem=strict
        ProtectHome=yes
        PrivateTmp=yes
        """)


def refresh_timer(policy: Policy) -> str:
    """Return the timer."""
    return _text(f"""
        [Unit]
        Description=Renew the addresses that jobs of sparkwright may connect to

        [Timer]
        OnActiveSec=1
        OnUnitActiveSec={policy.egress.refresh}min

        [Install]
        WantedBy=timers.target
        """)


def _text(indented: str) -> str:
    return textwrap.dedent(indented).lstrip()
