"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const SVG = "http://www.w3.org/2000/svg";
const color = (place) => `var(--c${place % 8})`;

function element(name, fields = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, fields = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
  return made;
}

function short(number) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  if (size >= 1e9) return (number / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (number / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (number / 1e3).toFixed(0) + "k";
  if (size >= 100 || Number.isInteger(number)) return number.toFixed(0);
  return size >= 1 ? number.toFixed(1) : number.toFixed(3);
}

const percent = (rate) => (rate === null ? "–" : (100 * rate).toFixed(1) + " %");

function ticks(least, most, count) {
  const raw = (most - least) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((it) => it * power).find((it) => it >= raw);
  const marks = [];
  for (let at = Math.ceil(least / step) * step; at <= most + step * 1e-9; at += step) marks.push(at);
  return marks;
}

const decades = (least, most) => {
  const marks = [];
  for (let at = Math.ceil(Math.log10(least)); at <= Math.log10(most); at++) marks.push(10 ** at);
  return marks.length > 1 ? marks : [least, most];
};

/* A plot of curves: {title, unit, curves: [{name, color, points: [[x, y]], dash}], x, y, area}. */
function plot(spec) {
  const [width, height, left, right, top, bottom] = [560, 250, 46, 12, 12, 28];
  const all = spec.curves.flatMap((curve) => curve.points).filter((point) => point[1] !== null);
  if (all.length === 0) return element("figure", {}, element("figcaption", {}, spec.title), "nothing to show");
  const xs = all.map((point) => point[0]);
  const ys = all.map((point) => point[1]);
  const is_log = Boolean(spec.log);
  let [x_least, x_most] = [Math.min(...xs), Math.max(...xs)];
  if (is_log) [x_least, x_most] = [Math.max(x_least, 1), Math.max(x_most, 10)];
  if (x_most === x_least) x_most = x_least + 1;
  const y_least = spec.least ?? 0;
  let y_most = spec.most ?? Math.max(...ys) * 1.05;
  if (!(y_most > y_least)) y_most = y_least + 1;
  const along = (x) => is_log
    ? (Math.log(Math.max(x, x_least)) - Math.log(x_least)) / (Math.log(x_most) - Math.log(x_least))
    : (x - x_least) / (x_most - x_least);
  const px = (x) => left + along(x) * (width - left - right);
  const py = (y) => height - bottom - ((y - y_least) / (y_most - y_least)) * (height - top - bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title });
  const shown = spec.show ?? short;
  for (const mark of ticks(y_least, y_most, 4)) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: py(mark), y2: py(mark) }));
    const text = drawn("text", { x: left - 7, y: py(mark) + 4, "text-anchor": "end" });
    text.textContent = shown(mark);
    svg.append(text);
  }
  for (const mark of is_log ? decades(x_least, x_most) : ticks(x_least, x_most, 6)) {
    const text = drawn("text", { x: px(mark), y: height - 9, "text-anchor": "middle" });
    text.textContent = short(mark) + (spec.x ?? "");
    svg.append(text);
  }
  for (const curve of spec.curves) {
    let path = "";
    let is_down = false;
    for (const [x, y] of curve.points) {
      if (y === null) { is_down = false; continue; }
      path += `${is_down ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
      is_down = true;
    }
    const fields = { class: "curve", d: path, style: `stroke:${curve.color}` };
    if (curve.dash) fields["stroke-dasharray"] = "5 4";
    if (curve.thin) fields["stroke-width"] = 1.1;
    svg.append(drawn("path", fields));
  }
  for (const mark of spec.marks ?? []) {
    svg.append(drawn("line", { x1: px(mark.x), x2: px(mark.x), y1: top, y2: height - bottom, style: "stroke:var(--soft)", "stroke-dasharray": "2 4" }));
  }
  const title = element("figcaption", {}, spec.title + " ");
  if (spec.unit) title.append(element("span", {}, spec.unit));
  const figure = element("figure", {}, title, svg);
  if (spec.legend) figure.append(legend(spec.curves));
  hover(figure, svg, spec, { px, left, right, width, x_least, x_most, is_log, shown });
  return figure;
}

function hover(figure, svg, spec, at) {
  const tip = element("div", { class: "tip" });
  const rule = drawn("line", { y1: 12, y2: 222, style: "stroke:var(--soft);display:none" });
  svg.append(rule);
  figure.append(tip);
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; rule.style.display = "none"; });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * at.width;
    const reference = spec.curves.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
    let nearest = 0;
    reference.forEach((point, place) => {
      if (Math.abs(at.px(point[0]) - x) < Math.abs(at.px(reference[nearest][0]) - x)) nearest = place;
    });
    const shown_x = reference[nearest][0];
    rule.setAttribute("x1", at.px(shown_x));
    rule.setAttribute("x2", at.px(shown_x));
    rule.style.display = "";
    tip.replaceChildren(element("div", {}, short(shown_x) + (spec.x ?? "")));
    for (const curve of spec.curves.slice(0, 12)) {
      const point = curve.points[Math.min(nearest, curve.points.length - 1)];
      const value = spec.swap ? point[0] : point[1];
      tip.append(element("div", {}, `${curve.name}: ${spec.swap ? short(value) + (spec.x ?? "") : at.shown(value)}`));
    }
    tip.style.display = "block";
    const into = event.clientX - figure.getBoundingClientRect().left;
    tip.style.top = "44px";
    tip.style.left = into > figure.clientWidth / 2 ? "" : into + 14 + "px";
    tip.style.right = into > figure.clientWidth / 2 ? figure.clientWidth - into + 14 + "px" : "";
  });
}

function legend(curves) {
  const entries = curves.map((curve) => element("span", {},
    element("i", { class: "swatch", style: `background:${curve.color}` }), curve.name));
  return element("div", { class: "legend" }, ...entries);
}

function section(title, note, figures, wide) {
  if (figures.length === 0) return;
  page.append(element("h2", {}, title), element("p", { class: "note" }, note),
    element("div", { class: wide ? "grid wide" : "grid" }, ...figures));
}

const timed = (run, values) => values.map((value, place) => [(place + 1) * run.curves.step_s, value]);

/* The mean of a few neighbours: single steps hold few requests. */
function smooth(values, reach = 2) {
  return values.map((_, place) => {
    const near = values.slice(Math.max(0, place - reach), place + reach + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

function head() {
  page.append(element("h1", {}, data.title), element("code", {}, data.command));
  if (data.verdicts.length) {
    page.append(element("ul", { class: "verdicts" }, ...data.verdicts.map((verdict) =>
      element("li", { class: verdict.holds ? "holds" : "fails" },
        element("b", {}, verdict.holds ? "holds" : "fails"), verdict.claim))));
  }
}

function table() {
  const has_users = data.runs.some((run) => Object.keys(run.service).length > 1 && run.gap !== null);
  const heads = ["run", "requests", "hit rate", "of ideal", "TTFT mean", "p50", "p90", "p99", "tokens/s", "load spread"];
  if (has_users) heads.push("gap", "bound", "least/most", "Jain");
  const rows = data.runs.map((run, place) => {
    const name = element("td", {}, element("i", { class: "swatch", style: `background:${color(place)}` }), run.label);
    const ms = (time) => (time >= 1e4 ? (time / 1e3).toFixed(1) + " s" : short(time) + " ms");
    const cells = [short(run.ok), percent(run.hit_rate), percent(run.share_of_ideal), ms(run.ttft_ms.mean), ms(run.ttft_ms.p50),
      ms(run.ttft_ms.p90), ms(run.ttft_ms.p99), short(run.tokens_per_s), run.load_spread.toFixed(1)];
    if (has_users) cells.push(short(run.gap), short(run.gap_bound), run.service_ratio === null ? "–" : run.service_ratio.toFixed(4),
      run.jain_index === null ? "–" : run.jain_index.toFixed(4));
    return element("tr", {}, name, ...cells.map((cell) => element("td", {}, cell)));
  });
  page.append(element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((it) => element("th", {}, it)))),
    element("tbody", {}, ...rows))));
}

function routing() {
  const curves = (points) => data.runs.map((run, place) => ({ name: run.label, color: color(place), points: points(run) }));
  const figures = [];
  if (data.runs.some((run) => run.hit_rate > 0)) {
    figures.push(plot({
      title: "Hit rate over time", unit: "prompt tokens found cached", most: 1, x: " s", legend: true, show: percent,
      curves: curves((run) => timed(run, smooth(run.curves.hit_rate))),
    }));
  }
  figures.push(plot({
    title: "Time to first token", unit: "share of requests that had it by then", log: true, most: 1, x: " ms", legend: true, show: percent,
    swap: true, curves: curves((run) => run.curves.ttft_ms.map((time, place) => [time, (place + 1) / 100])),
  }));
  section("Routing", "Every run sees the same requests.", figures, true);
}

function load() {
  const most = Math.max(...data.runs.flatMap((run) => run.curves.load.flat())) * 1.05;
  section("Load per backend", "Requests at each engine, running and waiting. Apart means uneven.", data.runs.map((run) => plot({
    title: run.label, unit: `busiest ${run.busiest_share.toFixed(2)} of an even share`, x: " s", most,
    curves: run.curves.load.map((values, place) => ({ name: `engine ${place}`, color: color(place), thin: true, points: timed(run, values) })),
  })));
}

function service() {
  const runs = data.runs.filter((run) => run.curves.users.length > 1 && run.gap !== null && run.gap > 0);
  const apart = (run) => {
    const users = run.curves.service;
    const mean = users[0].map((_, at) => users.reduce((sum, user) => sum + user[at], 0) / users.length);
    return users.map((user) => user.map((value, at) => value - mean[at]));
  };
  section("Service per user", "Priced tokens over the user's weight, against the mean of all users. Dashed: half the bound on each side, which " +
    "users who wait together cannot leave by more than.", runs.map((run) => {
    const curves = apart(run).map((values, place) => ({ name: run.curves.users[place], color: color(place), thin: true, points: timed(run, values) }));
    const reach = Math.max(...curves.flatMap((curve) => curve.points.map((point) => Math.abs(point[1]))));
    let most = reach;
    if (run.gap_bound !== null) {
      const ends = [run.curves.step_s, run.curves.step_s * run.curves.service[0].length];
      for (const side of [0.5, -0.5]) {
        curves.push({ name: "bound", color: "var(--soft)", dash: true, points: ends.map((x) => [x, side * run.gap_bound]) });
      }
      most = Math.max(reach, run.gap_bound / 2);
    }
    return plot({ title: run.label, unit: `largest gap ${short(run.gap)}`, x: " s", least: -most * 1.08, most: most * 1.08, curves });
  }));
}

function queue() {
  const waiting = data.runs.filter((run) => run.curves.waiting.some((value) => value > 0));
  if (waiting.length === 0) return;
  section("Waiting for admission", "Requests that no engine had room for.", [plot({
    title: "All requests", x: " s", legend: true,
    curves: data.runs.map((run, place) => ({ name: run.label, color: color(place), points: timed(run, run.curves.waiting) })),
  })], true);
}

function bins() {
  const runs = data.runs.filter((run) => run.curves.bins.length > 1);
  section("Bins", "Requests waiting, by bin of their predicted output length. Shortest first.", runs.map((run) => plot({
    title: run.label, unit: `edges ${run.bin_edges.slice(0, 7).join(", ")}${run.bin_edges.length > 7 ? ", …" : ""}`, x: " s",
    curves: run.curves.bins.map((values, place) => ({ name: `bin ${place}`, color: color(place), thin: true, points: timed(run, values) })),
  })));
}

head();
table();
routing();
load();
service();
queue();
bins();
