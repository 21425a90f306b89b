"""Who says so: statements, the keys and identities that sign them, and what this machine trusts."""

from sparkwright.release.signing.statement import Signer, Statement, Subject

__all__ = ["Signer", "Statement", "Subject"]
