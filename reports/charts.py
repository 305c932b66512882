"""Altair charts in one hand: the baseline always the same grey and first, six series at most, colour never alone.

Colours are Okabe and Ito's, distinguishable with colour-blind eyes; text and lines take the page's colours (page.js). Every
chart gets a description that states what it shows.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from reports.queries import Row

GREY = "#7f7f7f"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 1], [1, 1])
MOST_SERIES = 6
WIDTH = 680

PART_COLOURS = {
    "queue": "#b8860b",
    "prefill": "#0072b2",
    "first output": "#cc79a7",
    "decode: target": "#56b4e9",
    "decode: draft": "#d55e00",
    "decode: rest": GREY,
}


def spec_of(chart: Any, description: str) -> dict[str, Any]:
    """Vega-Lite as plain data, with its accessible name. The schema address is dropped: nothing may point outside."""
    spec: dict[str, Any] = chart.properties(description=description, background="transparent").to_dict()
    spec.pop("$schema", None)
    spec["usermeta"] = {"embedOptions": {}}
    return spec


def series_encodings(shown: list[str], names: list[str], title: str) -> dict[str, Any]:
    """Colour and dash for the series `shown`; one legend, because the titles are equal.

    A series keeps its look in every chart: it goes by its place in `names`, whose first one, the baseline, is grey and solid.
    """
    places = [names.index(name) for name in shown]
    colours = [[GREY, *SERIES][place] for place in places]
    dashes = [list(DASHES[place]) for place in places]
    return {
        "color": alt.Color("series:N", title=title, sort=shown, scale=alt.Scale(domain=shown, range=colours)),
        "strokeDash": alt.StrokeDash(
            "series:N",
            title=title,
            sort=shown,
            scale=alt.Scale(domain=shown, range=dashes),
        ),
    }


def budget_chart(rows: list[Row], scenarios: list[str], description: str) -> dict[str, Any]:
    """Stacked bars: mean latency by part, one bar per scenario. Rows: scenario, part, part_order, mean_ms."""
    parts = list(PART_COLOURS)
    data = alt.Data(values=[{**row, "mean_s": row["mean_ms"] / 1000} for row in rows])
    base = alt.Chart(data).encode(
        y=alt.Y("scenario:N", sort=scenarios, title=None, axis=alt.Axis(labelLimit=220)),
        x=alt.X("mean_s:Q", stack="zero", title="mean latency of a request, s"),
        order=alt.Order("part_order:Q"),
        color=alt.Color(
            "part:N", title="part", sort=parts, scale=alt.Scale(domain=parts, range=list(PART_COLOURS.values())),
            legend=alt.Legend(orient="bottom", columns=6),
        ),
        tooltip=[
            alt.Tooltip("scenario:N"),
            alt.Tooltip("part:N"),
            alt.Tooltip("mean_ms:Q", format=",.1f", title="mean, ms"),
        ],
    )  # fmt: skip
    return spec_of(
        base.mark_bar(stroke="white", strokeWidth=0.5).properties(width=WIDTH, height=alt.Step(34)), description
    )


def curve_chart(curve: list[Row], marks: list[Row], description: str) -> dict[str, Any]:
    """Miss ratio over cache size, log axis, with the ceiling and the installed sizes marked."""
    line = (
        alt.Chart(alt.Data(values=curve))
        .mark_line(color=SERIES[0], interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X("cache_gib:Q", scale=alt.Scale(type="log"), title="KV cache of the whole fleet as one, GiB (log)"),
            y=alt.Y("miss_ratio:Q", scale=alt.Scale(domain=[0, 1]), title="prompt tokens computed / prompt tokens"),
            tooltip=[
                alt.Tooltip("cache_gib:Q", format=",.4g", title="cache, GiB"),
                alt.Tooltip("miss_ratio:Q", format=".4f", title="computed share"),
                alt.Tooltip("reuse_ratio:Q", format=".4f", title="reused share"),
            ],
        )
    )
    layers = [line]
    if marks:
        points = [{**row, "miss_ratio": 1 - row["reuse_ratio"]} for row in marks]
        shape = alt.Shape("mark:N", title="marks", sort=[row["mark"] for row in marks])
        layers += [
            alt.Chart(alt.Data(values=points)).mark_rule(strokeDash=[3, 3], color=GREY).encode(x="cache_gib:Q"),
            alt.Chart(alt.Data(values=points))
            .mark_point(size=110, filled=True, color=SERIES[1])
            .encode(
                x="cache_gib:Q",
                y="miss_ratio:Q",
                shape=shape,
                tooltip=[
                    alt.Tooltip("mark:N"),
                    alt.Tooltip("cache_gib:Q", format=",.4g", title="GiB"),
                    alt.Tooltip("reuse_ratio:Q", format=".4f", title="reused share"),
                ],
            ),
        ]
    return spec_of(alt.layer(*layers).properties(width=WIDTH, height=280), description)


def hit_length_chart(rows: list[Row], scenarios: list[str], description: str) -> dict[str, Any]:
    """Grouped bars: share of requests by hit length. Rows: series, bin, bin_order, share.

    A series that is no scenario (the unbounded cache) has a colour of its own.
    """
    names = list(dict.fromkeys(row["series"] for row in rows))[:MOST_SERIES]
    rows = [row for row in rows if row["series"] in names]
    palette = dict(zip(scenarios, [GREY, *SERIES[:-1]], strict=False))
    bins = list(dict.fromkeys(row["bin"] for row in sorted(rows, key=lambda row: row["bin_order"])))
    colours = [palette.get(name, SERIES[-1]) for name in names]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("bin:N", sort=bins, title="hit length L_hit, tokens", axis=alt.Axis(labelAngle=-35)),
            xOffset=alt.XOffset("series:N", sort=names),
            y=alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%")),
            color=alt.Color("series:N", title="cache", sort=names, scale=alt.Scale(domain=names, range=colours)),
            tooltip=[alt.Tooltip("series:N"), alt.Tooltip("bin:N"), alt.Tooltip("share:Q", format=".2%")],
        )
    )
    return spec_of(chart.properties(width=WIDTH, height=220), description)


def interaction_chart(rows: list[Row], description: str) -> dict[str, Any]:
    """Bars: saving of each option alone, their sum, and both together. Rows: metric, option, order, saving_ms."""
    options = list(dict.fromkeys(row["option"] for row in sorted(rows, key=lambda row: row["order"])))
    colours = [SERIES[0], SERIES[1], GREY, SERIES[2]][: len(options)]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            y=alt.Y("option:N", sort=options, title=None, axis=alt.Axis(labelLimit=240)),
            x=alt.X("saving_ms:Q", title="saved against the baseline, ms (left of 0: lost)"),
            color=alt.Color("option:N", sort=options, legend=None, scale=alt.Scale(domain=options, range=colours)),
            row=alt.Row("metric:N", title=None, sort=list(dict.fromkeys(r["metric"] for r in rows)),
                        header=alt.Header(labelAngle=0, labelAlign="left")),
            tooltip=[alt.Tooltip("metric:N"), alt.Tooltip("option:N"),
                     alt.Tooltip("saving_ms:Q", format=",.1f", title="saved, ms")],
        )
        .properties(width=WIDTH - 180, height=alt.Step(20))
        .resolve_scale(x="independent")
    )  # fmt: skip
    return spec_of(chart, description)


def time_chart(
    rows: list[Row],
    shown: list[str],
    names: list[str],
    value: str,
    title: str,
    description: str,
    *,
    peak: float | None = None,
) -> dict[str, Any]:
    """Lines over the trace's time, the series `shown` of all `names`. Rows: series, minute, and `value`."""
    lines = (
        alt.Chart(alt.Data(values=[row for row in rows if row["series"] in shown]))
        .mark_line(strokeWidth=1.6)
        .encode(
            x=alt.X("minute:Q", title="minutes from the first arrival"),
            y=alt.Y(f"{value}:Q", title=title),
            tooltip=[
                alt.Tooltip("series:N", title="scenario"),
                alt.Tooltip("minute:Q", format=".1f"),
                alt.Tooltip(f"{value}:Q", format=",.3g"),
            ],
            **series_encodings(shown, names, "scenario"),
        )
    )
    layers: list[Any] = [lines]
    if peak is not None:
        mark = alt.Data(values=[{"minute": peak, "label": "baseline's peak"}])
        layers.append(alt.Chart(mark).mark_rule(strokeDash=[3, 3], color=SERIES[1]).encode(x="minute:Q"))
        layers.append(
            alt.Chart(mark)
            .mark_text(align="right", dx=-4, baseline="top", color=SERIES[1])
            .encode(x="minute:Q", y=alt.value(2), text="label:N")
        )
    return spec_of(alt.layer(*layers).properties(width=WIDTH, height=190), description)
