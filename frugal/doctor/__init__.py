"""`frugal doctor`: what this device is, what each operation would run as and why, and whether the numbers are right."""

from frugal.doctor.checks import run_checks
from frugal.doctor.examine import Diagnosis, doctor, examine
from frugal.doctor.judge import Check

__all__ = ["Check", "Diagnosis", "doctor", "examine", "run_checks"]
