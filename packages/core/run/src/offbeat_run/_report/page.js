"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const HEIGHT = 230, TRACK_HEIGHT = 30, AXES_HEIGHT = 64, NUM_COLORS = 8;
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const STEPS = [1, 2, 5].flatMap((each) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((power) => each * 10 ** power)).sort((a, b) => a - b);
  let plots = [];

  // A figure names a number of the page's palette, so that it follows the reader's light or dark theme.
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const slotColor = (slot) => (slot < 0 ? color("idle") : color("series-" + (slot % NUM_COLORS)));

  const numberText = (value) => {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  };
  const valueText = (value, unit) =>
    value === null || value === undefined ? "" : unit === "%" ? numberText(100 * value) + "%" : numberText(value);
  const timeText = (seconds) => {
    if (seconds < 1) return numberText(seconds) + " s";
    const whole = Math.round(seconds);
    if (seconds < 60) return numberText(seconds) + " s";
    if (whole < 3600) return Math.floor(whole / 60) + ":" + String(whole % 60).padStart(2, "0") + " min";
    return Math.floor(whole / 3600) + ":" + String(Math.floor(whole % 3600 / 60)).padStart(2, "0") + " h";
  };

  const axis = (more) => ({
    stroke: color("quiet"), font: FONT, grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1, size: 4 }, ...more,
  });
  const named = (unit) => (unit && unit !== "%" ? { label: unit, labelSize: 18, labelFont: FONT } : {});
  const widest = (u, values) => {
    if (!values) return 40;
    u.ctx.font = u.axes[1].font[0] || FONT;
    const width = Math.ceil(Math.max(...values.map((each) => u.ctx.measureText(each || "").width)) / devicePixelRatio) + 14;
    return Math.min(width, Math.ceil(u.width * 0.4));
  };

  // A track has the name of its role, which a plot on a phone must have room beside.
  const shortened = (text) => (text.length > 18 ? text.slice(0, 17) + "…" : text);

  // The numbers under the pointer stand in the legend, so that nothing covers the plot.
  const readout = (node, text) => (u) => {
    const places = node.querySelectorAll("[data-line]");
    const { idx } = u.cursor;
    for (const place of places) place.textContent = idx === null || idx === undefined ? "" : text(Number(place.dataset.line), idx);
    const at = node.querySelector("[data-at]");
    if (at) at.textContent = idx === null || idx === undefined ? "" : "update " + u.data[0][idx];
  };

  const whiskers = (u, line, at) => {
    const { ctx } = u, scale = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = slotColor(line.slot);
    ctx.lineWidth = scale;
    ctx.beginPath();
    u.data[0].forEach((x, i) => {
      const low = line.low[i], high = line.high[i];
      if (low === null || high === null || u.data[at][i] === null) return;
      const px = u.valToPos(x, "x", true), bottom = u.valToPos(low, "y", true), top = u.valToPos(high, "y", true);
      if (px < u.bbox.left || px > u.bbox.left + u.bbox.width) return;
      ctx.moveTo(px, bottom); ctx.lineTo(px, top);
      for (const end of [bottom, top]) { ctx.moveTo(px - 3 * scale, end); ctx.lineTo(px + 3 * scale, end); }
    });
    ctx.stroke();
    ctx.restore();
  };

  const extremes = (figure) => {
    const values = figure.lines.flatMap((line) => [...line.values, ...(line.low || []), ...(line.high || [])]).filter((v) => v !== null);
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (figure.zero) low = Math.min(low, 0);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    low = low === 0 && figure.zero ? 0 : low - room;
    return [low, figure.unit === "%" && figure.zero ? Math.min(high + room, Math.max(1, high)) : high + room];
  };

  const series = (line) => ({
    stroke: slotColor(line.slot), width: line.faint ? 1 : 2, alpha: line.faint ? 0.35 : 1, spanGaps: true,
    points: { show: Boolean(line.marked), size: 6, fill: slotColor(line.slot), stroke: slotColor(line.slot) },
  });
  const updates = () => axis({ ...named("update"), size: 30, incrs: STEPS, values: (u, all) => all.map((v) => v.toLocaleString("en-US")) });

  const lines = (figure, node) => {
    const drawn = figure.lines.map((line, i) => [line, i + 1]);
    // The legend has one entry a metric; a line and its faint version share it.
    const entry = (slot) => drawn.filter(([line]) => line.slot === slot).pop();
    return {
      data: [figure.x, ...figure.lines.map((line) => line.values)],
      options: {
        height: HEIGHT,
        scales: { x: { time: false }, y: { range: extremes(figure) } },
        axes: [updates(), axis({ size: widest, ...named(figure.unit), values: (u, all) => all.map((v) => valueText(v, figure.unit)) })],
        series: [{}, ...figure.lines.map(series)],
        hooks: {
          draw: [(u) => drawn.forEach(([line, at]) => line.low && whiskers(u, line, at))],
          setCursor: [readout(node, (slot, idx) => valueText(entry(slot)[0].values[idx], figure.unit))],
        },
      },
    };
  };

  // Shares of completions by lag, one column an update, with the mean lag on top.
  const columns = (figure, node) => {
    const cell = (u) => {
      const { ctx, bbox } = u, xs = figure.x, fill = color("series-0");
      const height = Math.abs(u.valToPos(1, "y", true) - u.valToPos(0, "y", true));
      ctx.save();
      ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
      ctx.fillStyle = fill;
      xs.forEach((x, i) => {
        const from = u.valToPos(i ? (xs[i - 1] + x) / 2 : x - (xs[1] - x) / 2, "x", true);
        const to = u.valToPos(i < xs.length - 1 ? (x + xs[i + 1]) / 2 : x + (x - xs[i - 1]) / 2, "x", true);
        figure.shares[i].forEach((share, lag) => {
          if (!share) return;
          ctx.globalAlpha = 0.15 + 0.8 * share;
          ctx.fillRect(from, u.valToPos(lag + 0.5, "y", true) + 1, Math.max(to - from - (to - from > 6 ? 1 : 0), 1), height - 2);
        });
      });
      ctx.restore();
    };
    const margin = (figure.x[figure.x.length - 1] - figure.x[0]) / (2 * Math.max(figure.x.length - 1, 1)) || 0.5;
    return {
      data: [figure.x, ...(figure.lines.length ? figure.lines.map((line) => line.values) : [figure.x.map(() => null)])],
      options: {
        height: HEIGHT,
        scales: { x: { time: false, range: (u, low, high) => [low - margin, high + margin] }, y: { range: [-0.5, figure.height - 0.5] } },
        axes: [updates(), axis({ size: widest, incrs: STEPS, ...named(figure.unit), values: (u, all) => all.map((v) => String(v)) })],
        series: [{}, ...(figure.lines.length ? figure.lines.map(series) : [{ stroke: "transparent" }])],
        hooks: {
          drawAxes: [cell],
          setCursor: [readout(node, (slot, idx) => slot === 0
            ? figure.shares[idx].map((share, lag) => share && valueText(share, "%") + " lag " + lag).filter(Boolean).slice(0, 4).join(", ")
            : numberText(figure.lines[0].values[idx]))],
        },
      },
    };
  };

  // When each process worked: one row a role, one colour a kind of work.
  const bars = (figure, node) => {
    const rows = figure.tracks.length, at = node.querySelector("[data-at]");
    const draw = (u) => {
      const { ctx, bbox } = u, height = bbox.height / rows;
      ctx.save();
      ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
      for (const kind of figure.bars) {
        ctx.fillStyle = slotColor(kind.slot);
        for (const [track, from, length] of kind.at) {
          const left = u.valToPos(from, "x", true), right = u.valToPos(from + length, "x", true);
          if (right < bbox.left || left > bbox.left + bbox.width) continue;
          ctx.fillRect(left, bbox.top + (track + 0.18) * height, Math.max(right - left, 1), height * 0.64);
        }
      }
      ctx.strokeStyle = color("quiet"); ctx.lineWidth = devicePixelRatio; ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const moment of figure.breaks) {
        const x = u.valToPos(moment, "x", true);
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      }
      ctx.restore();
    };
    const told = (u) => {
      const { left, top } = u.cursor;
      if (left < 0) { at.textContent = ""; return; }
      const moment = u.posToVal(left, "x"), track = Math.min(Math.floor(top / u.over.clientHeight * rows), rows - 1);
      const found = [...figure.bars].reverse().flatMap((kind) => kind.at.filter(([row, from, length]) => row === track && from <= moment && moment <= from + length).map(([, from, length]) => figure.tracks[track] + ": " + kind.name + ", " + timeText(length) + " from " + timeText(from)));
      at.textContent = found[0] || figure.tracks[track];
    };
    return {
      window: figure.window,
      data: [[0, figure.length], [null, null]],
      options: {
        height: rows * TRACK_HEIGHT + AXES_HEIGHT - 18,
        scales: { x: { time: false }, y: { range: [0, rows] } },
        axes: [
          axis({ size: 30, space: 70, values: (u, all) => all.map(timeText) }),
          axis({ grid: { show: false }, ticks: { show: false }, splits: () => figure.tracks.map((_, row) => row + 0.5), values: () => figure.tracks.map(shortened).reverse(), size: widest }),
        ],
        series: [{}, { stroke: "transparent" }],
        hooks: { drawAxes: [draw], setCursor: [told] },
      },
    };
  };

  const build = { lines, columns, bars };
  const draw = () => {
    for (const plot of plots) plot.destroy();
    plots = figures.map((figure, index) => {
      const place = document.getElementById("figure-" + index), { options, data, window: shown } = build[figure.kind](figure, place.parentElement);
      const cursor = { drag: { x: true, y: false }, points: { show: figure.kind !== "bars" }, y: false };
      const plot = new uPlot({ width: place.clientWidth, legend: { show: false }, padding: [10, 10, 0, 0], cursor, ...options }, data, place);
      if (shown) plot.setScale("x", { min: shown[0], max: shown[1] });
      return plot;
    });
    document.documentElement.dataset.drawn = String(plots.length);
  };

  draw();
  dark.addEventListener("change", draw);
  new ResizeObserver(() => plots.forEach((plot) => {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
  })).observe(document.querySelector("main"));
})();
