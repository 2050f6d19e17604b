"""Files of a user's own, for the tasks that need one.

`penguins.csv`: 344 penguins near Palmer Station, with missing values and categories. Gorman, Williams and
Fraser 2014, PLoS ONE 9(3), e90081; made a table by Horst, Hill and Gorman (palmerpenguins), under CC0.
"""

from pathlib import Path

PENGUINS = Path(__file__).parent / "penguins.csv"

GIVEN = {"own_table": {"file": str(PENGUINS), "target": "body_mass_g"}}
"""Task -> the settings that it cannot do without."""


def flags(name: str) -> list[str]:
    """The same as words of a command line."""
    return [word for key, value in GIVEN.get(name, {}).items() for word in (f"--task.{key}", value)]
