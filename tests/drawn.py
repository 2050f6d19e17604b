"""What every figure must tell its reader, found in a chart's specification and in the SVG made of it."""

import re


def units(spec, data=None):
    """Every layer of a chart, with its encoding and the values that it draws."""
    data = spec.get("data", data)
    parts = [part for key in ("layer", "concat", "hconcat", "vconcat") for part in spec.get(key, ())]
    for part in parts:
        outer = spec.get("encoding", {})
        yield from units({**part, "encoding": {**outer, **part.get("encoding", {})}}, data)
    if not parts:
        mark = spec["mark"] if isinstance(spec["mark"], dict) else {"type": spec["mark"]}
        yield mark, spec.get("encoding", {}), (data or {}).get("values", [])


def named(encoding):
    """Names that a layer's legend gives, or must give, to what it draws."""
    return {
        channel: encoding[channel]
        for channel in ("color", "stroke", "fill", "strokeDash", "shape")
        if "field" in encoding.get(channel, {}) and encoding[channel].get("legend", {}) is not None
    }


def unnamed(chart):
    """Dashed lines and dots of which no legend says what they are."""
    found = []
    for mark, encoding, _ in units(chart.to_dict()):
        is_dashed = "strokeDash" in mark or "strokeDash" in encoding
        if (is_dashed or mark["type"] in ("point", "circle")) and not named(encoding):
            found.append(mark)
    return found


def half_counts(chart):
    """Horizontal axes of whole numbers that may get ticks between them."""
    found = []
    for _, encoding, values in units(chart.to_dict()):
        x = encoding.get("x", {})
        numbers = [row[x["field"]] for row in values if x.get("field") in row]
        is_count = bool(numbers) and all(float(n).is_integer() for n in numbers)
        if x.get("type") == "quantitative" and is_count and x.get("axis", {}).get("tickMinStep", 0) < 1:
            found.append(x)
    return found


def names_in_legends(chart):
    """What the legends of a chart must say: every name of its series."""
    return {
        row[channel["field"]]
        for _, encoding, values in units(chart.to_dict())
        for channel in named(encoding).values()
        for row in values
        if channel.get("type") == "nominal"
    }


def texts(svg):
    """All texts of a figure, in order; lines of one text joined."""
    return [
        re.sub(r"&lt;", "<", re.sub(r"&amp;", "&", "".join(re.findall(r">([^<]+)<", part))))
        for part in re.findall(r"<text.*?</text>", svg, re.DOTALL)
    ]
