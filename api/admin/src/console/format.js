// Human-readable numbers, times and sizes.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat('en', { minimumFractionDigits: 1, maximumFractionDigits: 1 });
export const NONE = '–';

const isNone = (value) => value === undefined || value === null || Number.isNaN(value);

export const count = (value) => (isNone(value) ? NONE : whole.format(value));

/** A number with at most three significant digits: 950, 1.2k, 34k, 5.1M. */
export function short(value) {
  if (isNone(value)) return NONE;
  for (const [size, unit] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
    const scaled = value / (unit === 'k' ? 1e3 : size);
    if (Math.abs(value) >= size) return `${scaled < 100 ? one.format(scaled) : whole.format(scaled)}${unit}`;
  }
  return whole.format(value);
}

export const rate = (value) => (isNone(value) ? NONE : value < 100 ? one.format(value) : whole.format(value));

export const percent = (share, digits = 0) => (isNone(share) || !Number.isFinite(share) ? NONE : `${(share * 100).toFixed(digits)} %`);

/** Milliseconds, in a suitable unit. */
export function ms(value) {
  if (isNone(value)) return NONE;
  if (value < 1) return `${Math.max(1, Math.round(value * 1000))} µs`;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  return duration(value / 1000);
}

/** Seconds as 3 d 4 h, 2 h 5 min, 4 min 10 s. */
export function duration(seconds) {
  if (isNone(seconds)) return NONE;
  const parts = [[Math.floor(seconds / 86400), 'd'], [Math.floor(seconds / 3600) % 24, 'h'],
    [Math.floor(seconds / 60) % 60, 'min'], [Math.floor(seconds) % 60, 's']];
  const first = parts.findIndex(([number]) => number > 0);
  if (first < 0) return '0 s';
  return parts.slice(first, first + 2).filter(([number]) => number > 0).map(([number, unit]) => `${number} ${unit}`).join(' ');
}

export function bytes(value) {
  if (isNone(value)) return NONE;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let at = 0;
  let left = value;
  while (left >= 1024 && at < units.length - 1) { left /= 1024; at += 1; }
  return `${left < 10 && at > 0 ? one.format(left) : whole.format(left)} ${units[at]}`;
}

const clockTime = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const dateTime = new Intl.DateTimeFormat('en-GB', { day: '2-digit', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit' });

/** A Unix time in milliseconds as time of day, with the date if it is not today. */
export function time(unixMs) {
  if (!unixMs) return NONE;
  const date = new Date(unixMs);
  return date.toDateString() === new Date().toDateString() ? clockTime.format(date) : dateTime.format(date);
}

/** A JSON value on one line. */
export const value = (it) => (it === null || it === undefined ? NONE : typeof it === 'string' ? it : JSON.stringify(it));

export const plural = (number, word, words = `${word}s`) => `${count(number)} ${number === 1 ? word : words}`;
