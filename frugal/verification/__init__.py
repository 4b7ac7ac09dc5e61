"""Checks that can fail: of this machine (`frugal doctor`), and of a model, a run or an export."""

from frugal.verification.examine import Diagnosis, doctor, examine
from frugal.verification.judge import Check, Measurement, Subject
from frugal.verification.registry import CHECKS, CheckRow, run_checks

__all__ = ["CHECKS", "Check", "CheckRow", "Diagnosis", "Measurement", "Subject", "doctor", "examine", "run_checks"]
