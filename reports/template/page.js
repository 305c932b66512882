// Draws every chart of the page from its embedded specification, in the colours of the present theme.
const dark = matchMedia("(prefers-color-scheme: dark)");

function themeConfig(printing) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const ink = printing ? "#000000" : colour("--ink");
  const soft = printing ? "#333333" : colour("--soft");
  const grid = printing ? "#dddddd" : colour("--grid");
  const text = { labelColor: soft, titleColor: ink, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
  return {
    background: "transparent",
    font: "system-ui, sans-serif",
    axis: { ...text, gridColor: grid, domainColor: soft, tickColor: soft },
    legend: { ...text, symbolStrokeColor: ink },
    header: text,
    title: { color: ink },
    text: { color: ink },
    view: { stroke: grid },
  };
}

async function draw(printing = false) {
  const config = themeConfig(printing);
  const jobs = [...document.querySelectorAll("script.spec")].map(async (script) => {
    const target = document.getElementById(script.dataset.for);
    const spec = JSON.parse(script.textContent);
    // ast: expressions are interpreted, because the page's policy forbids building functions from text.
    await window.vegaEmbed(target, spec, { actions: false, renderer: "svg", ast: true, config, mode: "vega-lite" });
    target.dataset.drawn = "yes";
  });
  await Promise.all(jobs);
  document.documentElement.dataset.charts = String(jobs.length);
}

await draw();
dark.addEventListener("change", () => draw());
addEventListener("beforeprint", () => draw(true));
addEventListener("afterprint", () => draw());
