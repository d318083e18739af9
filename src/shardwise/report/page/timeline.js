"use strict";
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});

// Draws the steps of #timeline-data on canvases that share one clock. All text reaches the page
// as text, never as markup.
function drawTimeline() {
  const LANE = 16, HEAD = 21, CURVE = 72, CLOCK = 22, OPEN_AT_FIRST = 2;
  const root = document.getElementById("timeline");
  const source = document.getElementById("timeline-data");
  if (!root || !source) return;
  const told = JSON.parse(source.textContent);
  const ticks = Math.max(1, told.length_ns / told.tick_ns);
  const view = { begin: 0, end: ticks };
  const lanes = root.querySelector(".lanes"), hint = root.querySelector(".hint");
  const rows = [];

  async function inflate(text) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Int32Array(await new Response(stream).arrayBuffer());
  }

  async function unpack(step) {
    const n = step.spans, raw = await inflate(step.columns);
    const column = (i) => raw.subarray(i * n, (i + 1) * n);
    const lane = column(0), start = Float64Array.from(column(1));
    for (let i = 1; i < n; i++) start[i] += start[i - 1];
    const first = step.lanes.map(() => 0);
    const count = step.lanes.map(() => 0);
    for (let i = 0; i < n; i++) count[lane[i]]++;
    for (let i = 1; i < first.length; i++) first[i] = first[i - 1] + count[i - 1];
    const m = step.memory.points, memory = m ? await inflate(step.memory.columns) : new Int32Array();
    return { ...step, start, length: column(2), sort: column(3), label: column(4), first, count,
             when: memory.subarray(0, m), held: memory.subarray(m, 2 * m) };
  }

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = () => ["--compute", "--communication", "--copies"].map(style);

  function duration(ns) {
    if (ns >= 1e9) return (ns / 1e9).toPrecision(4) + " s";
    if (ns >= 1e6) return (ns / 1e6).toPrecision(4) + " ms";
    return ns >= 1e3 ? (ns / 1e3).toPrecision(4) + " µs" : ns.toFixed(0) + " ns";
  }
  function size(kib) {
    if (kib >= 2 ** 20) return (kib / 2 ** 20).toFixed(2) + " GiB";
    return kib >= 1024 ? (kib / 1024).toFixed(1) + " MiB" : kib.toFixed(0) + " KiB";
  }

  // The first span of a lane that ends after a moment; spans of a lane are in order.
  function after(data, lane, moment) {
    let low = data.first[lane], high = low + data.count[lane];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.start[middle] + data.length[middle] <= moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  function paint(row) {
    const canvas = row.canvas, width = canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1, height = row.height();
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    row.draw(c, width, height);
  }

  function spans(c, data, lane, y, width, palette) {
    const scale = width / (view.end - view.begin);
    const last = data.first[lane] + data.count[lane];
    let edge = -1, sort = -1;
    for (let i = after(data, lane, view.begin); i < last && data.start[i] < view.end; i++) {
      const x = (data.start[i] - view.begin) * scale;
      const end = x + Math.max(0.7, data.length[i] * scale);
      // What lies within a pixel that is drawn already cannot be seen.
      if (end <= edge && data.sort[i] === sort) continue;
      c.fillStyle = palette[data.sort[i]];
      c.fillRect(Math.max(0, x), y + 2, Math.min(width, end) - Math.max(0, x), LANE - 4);
      edge = end; sort = data.sort[i];
      if (end - x > 60) {
        c.fillStyle = "#fff";
        c.save(); c.beginPath(); c.rect(x, y, end - x - 4, LANE); c.clip();
        c.fillText(told.names[data.label[i]], Math.max(4, x + 4), y + LANE - 5);
        c.restore();
      }
    }
  }

  function stepRow(data, open) {
    const row = { data, open };
    row.height = () => row.open ? HEAD + data.lanes.length * LANE + 6 : LANE + 8;
    row.draw = (c, width) => {
      const palette = colours();
      c.font = "11px system-ui, sans-serif";
      // Closed, compute hides what it overlaps: what is left to see is exposed.
      if (row.open) data.lanes.forEach((_, n) => spans(c, data, n, HEAD + n * LANE, width, palette));
      else for (const wanted of [2, 1, 0]) {
        const only = palette.map((colour, n) => (n === wanted ? colour : "transparent"));
        data.lanes.forEach((_, n) => spans(c, data, n, 4, width, only));
      }
    };
    row.at = (x, y, width) => {
      const moment = view.begin + (x / width) * (view.end - view.begin);
      const slack = 2 * (view.end - view.begin) / width;
      const lane = Math.floor((y - HEAD) / LANE);
      const among = row.open ? [lane] : data.lanes.map((_, n) => n);
      for (const n of among) {
        if (n < 0 || n >= data.lanes.length) continue;
        const i = after(data, n, moment - slack);
        if (i < data.first[n] + data.count[n] && data.start[i] <= moment + slack)
          return `${told.names[data.label[i]]}: ${told.kinds[data.sort[i]]} on ${data.lanes[n]}, ` +
            `${duration(data.length[i] * told.tick_ns)} from ` +
            `${duration(data.start[i] * told.tick_ns)} (${data.kind})`;
      }
      return `${data.name}: ${duration(moment * told.tick_ns)} (${data.kind})`;
    };
    return row;
  }

  function memoryRow(curves) {
    const most = Math.max(...curves.map((d) => d.held.reduce((a, b) => Math.max(a, b), 0)));
    const row = { curves, height: () => CURVE };
    const place = (kib) => CURVE - 4 - (kib / most) * (CURVE - 18);
    const shade = (d) => style(d.kind === "measured" ? "--s3" : "--s4");
    row.draw = (c, width) => {
      const scale = width / (view.end - view.begin);
      for (const d of curves) {
        c.strokeStyle = shade(d);
        c.setLineDash(d.kind === "measured" ? [] : [5, 3]);
        c.lineWidth = 1.5;
        c.beginPath();
        let y = null;
        for (let i = 0; i < d.when.length; i++) {
          const x = (d.when[i] - view.begin) * scale;
          if (y !== null) c.lineTo(x, y); else c.moveTo(x, place(d.held[i]));
          y = place(d.held[i]);
          c.lineTo(x, y);
        }
        if (y !== null) c.lineTo((d.end - view.begin) * scale, y);
        c.stroke();
      }
      c.setLineDash([]);
      c.fillStyle = style("--soft");
      c.font = "11px system-ui, sans-serif";
      c.fillText(size(most), 4, 11);
    };
    row.at = (x, y, width) => {
      const moment = view.begin + (x / width) * (view.end - view.begin);
      return curves.map((d) => {
        let held = 0;
        for (let i = 0; i < d.when.length && d.when[i] <= moment; i++) held = d.held[i];
        return `${d.name} ${size(held)} (${d.kind})`;
      }).join(", ") + ` at ${duration(moment * told.tick_ns)}`;
    };
    return row;
  }

  function clockRow() {
    const row = { height: () => CLOCK };
    row.draw = (c, width) => {
      const shown = (view.end - view.begin) * told.tick_ns;
      let step = 10 ** Math.floor(Math.log10(shown / (width / 110)));
      for (const factor of [2, 5, 10]) if (shown / step > width / 90) step *= factor / (factor === 5 ? 2 : factor === 10 ? 5 : 1);
      const begin = view.begin * told.tick_ns + told.begin_ns;
      c.fillStyle = style("--soft");
      c.font = "11px system-ui, sans-serif";
      for (let mark = Math.ceil(begin / step) * step; mark <= begin + shown; mark += step) {
        const x = ((mark - begin) / shown) * width;
        c.fillRect(x, CLOCK - 5, 1, 5);
        c.fillText(mark === 0 ? "0" : duration(mark).replace(/\.?0+(?= )/, ""), x + 3, 13);
      }
    };
    row.at = () => "";
    return row;
  }

  function add(row, label) {
    const line = document.createElement("div"), left = document.createElement("div");
    line.className = row.sticky ? "row clock" : "row";
    row.canvas = document.createElement("canvas");
    row.canvas.setAttribute("aria-hidden", "true");
    left.append(...label);
    line.append(left, row.canvas);
    lanes.append(line);
    rows.push(row);
    row.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) return;
      const box = row.canvas.getBoundingClientRect();
      hint.textContent = row.at(event.clientX - box.left, event.clientY - box.top, box.width);
    });
    grab(row.canvas);
  }

  function text(content, name) {
    const span = document.createElement("div");
    span.textContent = content;
    if (name) span.className = name;
    return span;
  }

  function addStep(data, open) {
    const row = stepRow(data, open);
    const button = document.createElement("button");
    button.textContent = data.name;
    button.title = `${data.name}, ${data.kind}, ${duration(data.length_ns)}`;
    const names = document.createElement("div");
    names.append(...data.lanes.map((lane) => text(lane, "lane")));
    const show = () => {
      button.setAttribute("aria-expanded", String(row.open));
      names.hidden = !row.open;
      paint(row);
    };
    button.addEventListener("click", () => { row.open = !row.open; show(); });
    add(row, [button, names]);
    show();
  }

  // ---- moving -------------------------------------------------------------------------------

  let queued = false;
  function repaint() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; rows.forEach(paint); });
  }
  function zoom(factor, share = 0.5) {
    const length = Math.min(ticks, Math.max(20, (view.end - view.begin) * factor));
    const centre = view.begin + share * (view.end - view.begin);
    move(centre - share * length, length);
  }
  function move(begin, length) {
    view.begin = Math.min(Math.max(0, begin), ticks - length);
    view.end = view.begin + length;
    repaint();
  }
  const shift = (share) => move(view.begin + share * (view.end - view.begin), view.end - view.begin);
  const actions = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "−": () => zoom(2),
    "0": () => move(0, ticks), ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2),
  };

  function grab(canvas) {
    const fingers = new Map();
    let spread = 0;
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      const before = fingers.get(event.pointerId), width = canvas.clientWidth;
      fingers.set(event.pointerId, event.clientX);
      if (fingers.size === 1) shift((before - event.clientX) / width);
      else {
        const [a, b] = fingers.values(), now = Math.abs(a - b);
        if (spread && now) zoom(spread / now, ((a + b) / 2 - canvas.getBoundingClientRect().left) / width);
        spread = now;
      }
    });
    for (const end of ["pointerup", "pointercancel"])
      canvas.addEventListener(end, (event) => { fingers.delete(event.pointerId); spread = 0; });
    canvas.addEventListener("wheel", (event) => {
      const box = canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(1.002 ** event.deltaY, (event.clientX - box.left) / box.width);
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        shift(event.deltaX / box.width);
      }
    }, { passive: false });
  }

  lanes.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });

  function buttons() {
    const group = root.querySelector(".buttons");
    for (const [key, label] of [["−", "Zoom out"], ["+", "Zoom in"], ["ArrowLeft", "Left"], ["ArrowRight", "Right"], ["0", "Whole step"]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = { ArrowLeft: "←", ArrowRight: "→", 0: "Whole step" }[key] || key;
      button.setAttribute("aria-label", label);
      button.addEventListener("click", actions[key]);
      group.append(button);
    }
  }

  async function start() {
    if (typeof DecompressionStream === "undefined") {
      hint.textContent = "This browser is too old to unpack the timeline.";
      return;
    }
    const steps = await Promise.all(told.steps.map(unpack));
    buttons();
    const clock = clockRow();
    clock.sticky = true;
    add(clock, []);
    // One curve of each kind: those of more ranks would cover each other.
    const curves = ["simulated", "measured"]
      .map((kind) => steps.find((d) => d.kind === kind && d.when.length))
      .filter(Boolean)
      .map((d) => ({ ...d, end: d.when[d.when.length - 1] }));
    if (curves.length) add(memoryRow(curves), [text("memory"), ...curves.map((d) => text(`${d.kind === "measured" ? "━" : "╌"} ${d.name}`))]);
    const open = new Set(["simulated", "measured"].map((kind) => steps.find((d) => d.kind === kind)));
    for (const data of steps) addStep(data, steps.length <= OPEN_AT_FIRST || open.has(data));
    repaint();
    new ResizeObserver(repaint).observe(lanes);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
    hint.textContent = "Point at a span to see what it is.";
  }
  start();
}
drawTimeline();
