"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Traces name a slot of the page's palette, so that a figure follows the reader's light or dark theme.
  const painted = (trace) => {
    const slot = trace.meta && trace.meta.slot;
    if (slot === undefined) return trace;
    const chosen = slot === "quiet" ? color("idle") : color("series-" + (slot % 8));
    return { ...trace, line: { width: 2, ...trace.line, color: chosen }, marker: { size: 6, color: chosen, line: { width: 0 } } };
  };

  const axis = (given) => ({
    gridcolor: color("grid"), zerolinecolor: color("grid"), linecolor: color("edge"), automargin: true, ...given,
  });

  const styled = (layout) => ({
    height: 260, margin: { l: 48, r: 12, t: 10, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("quiet"), family: "system-ui, sans-serif", size: 12 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hovermode: layout.barmode ? "closest" : "x unified",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("edge"), font: { color: color("text") } },
    ...layout,
    xaxis: axis({ title: { text: "updates" }, ...layout.xaxis }),
    yaxis: axis(layout.yaxis),
  });

  const draw = () => Promise.all(figures.map((figure, index) =>
    Plotly.react("figure-" + index, figure.data.map(painted), styled(figure.layout), { displayModeBar: false, responsive: true })));

  draw().then(() => { document.documentElement.dataset.drawn = String(figures.length); });
  dark.addEventListener("change", draw);
})();
