"""`frugal doctor`: what this device is, what each operation would run as and why, and whether the numbers are right."""

from frugal.verification.checks import run_checks
from frugal.verification.examine import Diagnosis, doctor, examine
from frugal.verification.judge import Check

__all__ = ["Check", "Diagnosis", "doctor", "examine", "run_checks"]
