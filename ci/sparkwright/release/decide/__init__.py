"""Whether wheels may be published, and where: a pure decision from their bytes, the verdicts about them, and a reviewed policy."""
