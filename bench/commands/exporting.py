"""`bench export`: the predictor of a run as a file of ONNX."""

from __future__ import annotations

from pathlib import Path

from bench.commands.parser import Parser, add_imports, output
from bench.errors import UsageError


def export(arguments: list[str]) -> None:
    """Writes the predictor of a run on own data as ONNX; prints the path."""
    parser = Parser(
        "bench export",
        description="Write the predictor of a run of own_table or own_images as ONNX, its draws of the "
        "weights as constants: mean probabilities and mutual information (nats) of classes; mean, standard "
        "deviation and the ends of the central interval of a number, in its unit.",
    )
    parser.add_argument("RUN", type=str, help="directory of a run")
    parser.add_argument("--to", type=str, required=True, metavar="FILE.onnx", help="the file")
    parser.add_argument(
        "--level", type=float, default=0.9, help="probability inside the interval of a number"
    )
    add_imports(parser)
    chosen = parser.parse_args(arguments)

    from bench.runs.runner import load

    predictor = load(chosen.RUN)
    if not hasattr(predictor, "export"):
        raise UsageError(f"{chosen.RUN}: only runs on own data (own_table, own_images) are written as ONNX")
    try:
        predictor.export(chosen.to, chosen.level)
    except UsageError as error:
        raise UsageError(f"bench export {chosen.RUN}: {error}") from None
    output.print(str(Path(chosen.to)), soft_wrap=True)
