"""The client of a release index: everything that a machine needs to install and check releases."""

#: Command → its summary.
COMMANDS = {
    "install": "install a release into an environment of its own",
    "list": "list the releases of an index, and those that are installed",
    "rollback": "switch back to the previous release",
    "uninstall": "remove a release",
    "doctor": "show whether the installed releases are as they were made",
    "run": "run a program of the current release",
}
