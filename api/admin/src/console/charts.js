// Small hand-drawn charts.

import { attr, h, put, svg } from './dom.js';
import { duration } from './format.js';

const WIDTH = 240;
const HEIGHT = 48;

function points(values, max) {
  const step = WIDTH / Math.max(1, values.length - 1);
  const parts = [];
  let isOpen = false;
  values.forEach((value, at) => {
    if (value === null || value === undefined) { isOpen = false; return; }
    const y = HEIGHT - 2 - (value / max) * (HEIGHT - 6);
    parts.push(`${isOpen ? 'L' : 'M'}${(at * step).toFixed(1)} ${y.toFixed(1)}`);
    isOpen = true;
  });
  return parts.join('');
}

/**
 * A line chart over time, one value a second. `draw([[…], […]])` takes one list of numbers per line;
 * `null` is a gap. `format` writes the highest value beside the top of the chart, which begins at 0.
 */
export function lines(label, classes = ['line-a'], format = String) {
  const paths = classes.map((name) => svg('path', { class: `line ${name}` }));
  const area = svg('path', { class: 'area' });
  const picture = svg('svg', { class: 'lines', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label }, area, paths);
  const top = h('span', { class: 'num' });
  const span = h('span', { class: 'num' });
  return {
    node: h('div', { class: 'plot' }, h('div', { class: 'axis' }, top), picture, h('div', { class: 'axis' }, span, h('span', null, 'now'))),
    draw(series, least = 0) {
      const length = Math.max(30, ...series.map((it) => it.length));
      const padded = series.map((it) => [...Array(length - it.length).fill(null), ...it]);
      const most = Math.max(...padded.flat().filter((it) => it !== null));
      const max = Math.max(least, most) || 1;
      padded.forEach((values, at) => attr(paths[at], 'd', points(values, max)));
      const first = padded[0];
      const from = first.findIndex((it) => it !== null);
      const step = WIDTH / (length - 1);
      const isWhole = from >= 0 && first.slice(from).every((it) => it !== null);
      attr(area, 'd', isWhole ? `${points(first, max)}L${WIDTH} ${HEIGHT}L${(from * step).toFixed(1)} ${HEIGHT}Z` : '');
      put(top, Number.isFinite(most) ? `0 to ${format(max)}` : 'No values yet');
      put(span, `${duration(length)} ago`);
    },
  };
}

/** A bar filled in proportion, with its number beside it. */
export function meter(kind = '') {
  const bar = h('span', { class: `fill ${kind}` });
  const text = h('span', { class: 'num' });
  const node = h('span', { class: 'meter' }, h('span', { class: 'track', 'aria-hidden': 'true' }, bar), text);
  return {
    node,
    set(share, label, isWarning = false) {
      const width = `${(Math.max(0, Math.min(1, share || 0)) * 100).toFixed(1)}%`;
      if (bar.style.width !== width) bar.style.setProperty('width', width);
      bar.classList.toggle('warn', isWarning);
      put(text, label);
    },
  };
}

/** A status word, distinguished by shape as well as by colour. */
export const status = (kind, word) => h('span', { class: `status ${kind}` }, h('span', { class: 'dot', 'aria-hidden': 'true' }), h('span', null, word));

export function setStatus(node, kind, word) {
  attr(node, 'class', `status ${kind}`);
  put(node.lastChild, word);
}
