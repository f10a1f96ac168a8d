"""The layers point one way: the pure rooms know neither the trainer nor its libraries."""

import subprocess
import sys

import pytest


PURE = [
    "arrays",
    "memory.posterior",
    "memory.state",
    "pack.batch",
    "pack.exchange",
    "pack.layout",
    "pack.weights",
    "memory.index",
    "plan.passes",
    "plan.planners",
    "seeding",
    "rollout.allocation",
    "rollout.controllers",
    "select.advantages",
    "select.energy",
    "select.selectors",
]


@pytest.mark.parametrize("modules", [PURE], ids=[" ".join(PURE)])
def test_pure_modules_import_neither_trl_nor_transformers(modules):
    program = "import sys\n"
    for module in modules:
        program += (
            f"import lze_trl.{module}\n"
            "found = sorted({name.partition('.')[0] for name in sys.modules} & {'trl', 'transformers'})\n"
            f"if found: sys.exit(f'lze_trl.{module} imports {{found}}: move what needs them to another module')\n"
        )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
