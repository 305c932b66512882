"""The page in Chromium with the network off: no request, no console error, every chart drawn, both themes, print."""

from __future__ import annotations

import shutil
import warnings

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM ON THIS MACHINE: the browser tests did not run (Debian: apt-get install chromium)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        arguments = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
        ]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, run_folder, request):
    """The report, open: (page, requests, complaints)."""
    context = browser.new_context(
        offline=True, viewport={"width": 1280, "height": 900}, **getattr(request, "param", {})
    )
    page = context.new_page()
    requests, complaints = [], []
    page.on("request", lambda each: requests.append(each.url))
    page.on("console", lambda each: complaints.append(each.text) if each.type in ("error", "warning") else None)
    page.on("pageerror", lambda each: complaints.append(str(each)))
    page.goto((run_folder / "report.html").as_uri())
    page.wait_for_selector("html[data-charts]", timeout=30_000)
    yield page, requests, complaints
    context.close()


THEMES = [{"color_scheme": "light"}, {"color_scheme": "dark"}]


@pytest.mark.parametrize("opened", THEMES, indirect=True, ids=["light", "dark"])
def test_opens_without_network_or_complaint(opened):
    _page, requests, complaints = opened
    assert [url for url in requests if not url.startswith("file://")] == []
    assert len(requests) == 1
    assert complaints == []


@pytest.mark.parametrize("opened", THEMES, indirect=True, ids=["light", "dark"])
def test_every_chart_is_drawn_and_named(opened):
    page, _, _ = opened
    charts = page.locator(".chart")
    assert charts.count() >= 8
    for index in range(charts.count()):
        chart = charts.nth(index)
        box = chart.locator("svg").bounding_box()
        assert box["width"] > 300 and box["height"] > 60
        assert chart.locator("svg path, svg rect").count() > 3, "drawn, not empty"
        # Vega puts the description on the element that it draws into.
        assert (
            len(
                page.evaluate(
                    "chart => (chart.getAttribute('aria-label') || chart.querySelector('[aria-label]')?.getAttribute('aria-label') || '')",
                    chart.element_handle(),
                )
            )
            > 20
        )


def luminance(colour):
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("opened", THEMES, indirect=True, ids=["light", "dark"])
def test_text_contrast(opened):
    """WCAG: at least 4.5:1 for body text, soft text, links, warnings and the charts' labels, on the page's background."""
    page, _, _ = opened
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for selector in ("h2", "figcaption", "nav a", ".tile .label", "caption", "td"):
        colour = page.evaluate("s => getComputedStyle(document.querySelector(s)).color", selector)
        light, dark = sorted((luminance(colour), luminance(background)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector
    label = page.evaluate("getComputedStyle(document.querySelector('.chart svg text')).fill")
    light, dark = sorted((luminance(label), luminance(background)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_wide_tables_scroll_and_the_page_does_not(opened):
    page, _, _ = opened
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.set_viewport_size({"width": 420, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_first_paint_is_recorded_and_prints_to_pdf(opened):
    page, _, _ = opened
    paints = page.evaluate("performance.getEntriesByType('paint').map(each => each.name)")
    assert "first-contentful-paint" in paints
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000


def test_tables_unfold_and_csv_downloads(opened):
    page, _, _ = opened
    details = page.locator("details").first
    details.locator("summary").click()
    assert details.locator("table").is_visible()
    with page.expect_download() as download:
        page.locator(".download a").first.click()
    assert download.value.suggested_filename.endswith(".csv")
