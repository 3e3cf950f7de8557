"""What must hold for programs that nobody here wrote: run with 2 processes, see ``test_strangers.py``."""

from __future__ import annotations

from tests.engine.captured_cases import CASES as CAPTURED
from tests.engine.captured_models_cases import BOTH as CAPTURED_MODELS
from tests.engine.changed_modules_cases import CASES as CHANGED_MODULES
from tests.engine.drawn_numbers_cases import CASES as DRAWN_NUMBERS
from tests.engine.harness import run_cases
from tests.engine.measured_state_cases import CASES as MEASURED_STATE
from tests.engine.measured_weights_cases import CASES as MEASURED_WEIGHTS
from tests.engine.program_parts_cases import CASES as PROGRAM_PARTS
from tests.engine.start_up_cases import CASES as START_UP
from tests.engine.strangers_cases import CASES as STRANGERS

CASES = {
    case.__name__: case
    for cases in (
        CHANGED_MODULES, CAPTURED, CAPTURED_MODELS, MEASURED_STATE, MEASURED_WEIGHTS, DRAWN_NUMBERS, START_UP,
        PROGRAM_PARTS, STRANGERS,
    )
    for case in cases
}  # fmt: skip

if __name__ == "__main__":
    run_cases(CASES)
