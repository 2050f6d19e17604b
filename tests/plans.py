"""Plans in few words."""

from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.settings import build


def resolved(
    method, task, preset="standard", method_settings=None, task_settings=None, members=None, is_typed=False
):
    """What a plan of these values asks for; names of one's own must be known already, unless typed."""
    values = {"method_settings": method_settings or {}, "task_settings": task_settings or {}}
    plan = build(Plan, {"method": method, "task": task, "preset": preset, "members": members, **values})
    return resolve(plan, is_typed)
