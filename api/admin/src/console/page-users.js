// The users, those that wait, and whether each gets a fair share.

import { every, get, pathOfUser } from './api.js';
import { setWeight } from './actions.js';
import { meter } from './charts.js';
import { h, icon, put, swap } from './dom.js';
import { NONE, count, ms, percent, plural, short, time } from './format.js';
import { isFresh, live, may, watch } from './live.js';
import { table } from './table.js';

export const title = 'Users';

/** A user's service: charged tokens, with output at twice the price of input. */
const service = (usage, isUncachedOnly) => usage.input_uncached + (isUncachedOnly ? 0 : usage.input_cached) + 2 * usage.output;

export function mount(root, signal, [wanted]) {
  const known = new Map();
  let waits = new Map();
  let isUncachedOnly = true;
  let open = wanted;
  let isWhole = false;
  /** Share at which a bar is full, the same for all rows. */
  let scale = 1;
  const summary = h('p', { class: 'note', role: 'status' }, 'Reading the users …');
  const waiting = h('div', { class: 'waiting' });
  const filter = h('input', { type: 'search', id: 'filter', placeholder: 'Name', autocomplete: 'off', oninput: () => show() });
  const shareCell = () => {
    const it = meter();
    const mark = h('span', { class: 'mark', 'aria-hidden': 'true' });
    it.node.firstChild.append(mark);
    return { node: it.node, update: (row) => {
      it.set((row.share ?? 0) / scale, percent(row.share, 1));
      mark.hidden = row.share === null;
      mark.style.setProperty('left', `${((row.fair ?? 0) / scale) * 98}%`);
    } };
  };
  const columns = [
    { title: 'User', head: true, by: (row) => row.name, make: () => {
      const button = h('button', { type: 'button', class: 'link', onclick: () => { open = button.row; show(); } });
      return { node: button, update: (row) => { button.row = row.name; put(button, row.name); } };
    } },
    { title: 'Longest wait', by: (row) => row.waited ?? (row.waiting.cluster ? 0.5 : 0), number: true, text: (row) => (row.waited ? ms(row.waited) : row.waiting.cluster ? 'At another replica' : NONE) },
    { title: 'Queue', by: (row) => row.waiting.cluster, number: true, wide: true, text: (row) => count(row.waiting.cluster) },
    { title: 'In flight', by: (row) => row.in_flight, number: true, wide: true, text: (row) => count(row.in_flight) },
    { title: 'Recent share', by: (row) => (row.share === null ? -1 : row.share), number: true, make: shareCell },
    { title: 'Fair share', by: (row) => (row.fair === null ? -1 : row.fair), number: true, wide: true, text: (row) => percent(row.fair, 1) },
    { title: 'Counter', by: (row) => row.counter_milli_tokens, number: true, wider: true, text: (row) => short(row.counter_milli_tokens / 1000) },
    { title: 'Weight', by: (row) => row.weight_milli, number: true, wider: true, text: (row) => String(row.weight_milli / 1000) },
    { title: 'Requests', by: (row) => row.total.requests, number: true, wide: true, text: (row) => short(row.total.requests) },
    { title: 'Limits left', wider: true, text: (row) => left(row) },
  ];
  const grid = table({ label: 'Users', columns, key: (row) => row.key, tie: (row) => row.name, sort: { at: 1, down: true }, empty: 'No user fits.' });
  const detail = h('aside', { class: 'card detail', 'aria-label': 'User', hidden: true });
  swap(root, h('section', { 'aria-label': 'Waiting longest' }, waiting),
    h('div', { class: 'row tools' }, h('label', { for: 'filter', class: 'hidden' }, 'Filter'), filter, summary), h('div', { class: 'split' }, grid.node, detail));

  function show() {
    const all = [...known.values()];
    const isActive = (it) => it.window.requests > 0 || it.in_flight > 0 || it.waiting.cluster > 0;
    let served = 0;
    let weights = 0;
    for (const it of all) {
      if (!isActive(it)) continue;
      served += service(it.window, isUncachedOnly);
      weights += it.weight_milli;
    }
    const text = filter.value.trim().toLowerCase();
    const rows = [];
    for (const it of all) {
      if (text && !it.name.toLowerCase().includes(text)) continue;
      const isCounted = isActive(it) && served > 0;
      it.share = isCounted ? service(it.window, isUncachedOnly) / served : null;
      it.fair = isCounted ? it.weight_milli / weights : null;
      it.waited = waits.get(it.name);
      rows.push(it);
    }
    scale = Math.max(0.01, ...rows.map((it) => Math.max(it.share ?? 0, it.fair ?? 0)));
    grid.set(rows);
    put(summary, all.length ? `${count(all.length)} known${isWhole ? '' : ' so far'}${text ? `, ${count(rows.length)} shown` : ''}. Recent share: of what was served in the last minutes; the mark in the bar is the fair share, by weight.` : isWhole ? 'No request was made yet.' : 'Reading the users …');
    const row = all.find((it) => it.name === open);
    detail.hidden = !row;
    if (row) showDetail(row);
  }

  function showDetail(it) {
    const rows = [
      ['Queue', `${count(it.waiting.cluster)} in all, ${count(it.waiting.here)} at replica ${live.me.replica}`], ['In flight', count(it.in_flight)],
      ['Counter', `${count(it.counter_milli_tokens / 1000)} tokens, priced and divided by weight`], ['Weight', String(it.weight_milli / 1000)],
      ['Recent share', it.share === null ? 'Not active' : `${percent(it.share, 1)}; fair by weight: ${percent(it.fair, 1)}`],
      ['Requests', count(it.total.requests)], ['Prompt tokens', `${count(it.total.input_uncached)} computed, ${count(it.total.input_cached)} cached`],
      ['Output tokens', count(it.total.output)], ['Limits left', left(it)], ['Models', it.config.models?.join(', ') || 'All'],
      ['Cached blocks', cacheOf(it.config.cache)],
      ['Last charged', time(it.last_charge_ms)],
    ];
    if (detail.shown !== it.name) {
      detail.shown = it.name;
      detail.cells = rows.map(() => h('dd'));
      const weight = may('operator') && h('button', { type: 'button', onclick: () => setWeight(known.get(it.key) ?? it) }, 'Set weight …');
      swap(detail, h('header', { class: 'row' }, h('h2', null, it.name), h('span', { class: 'grow' }), h('button', { type: 'button', class: 'plain', 'aria-label': 'Close', onclick: () => { open = undefined; show(); } }, icon('close'))),
        h('div', { class: 'row' }, weight, h('a', { class: 'button', href: `#/decisions/?user=${encodeURIComponent(it.name)}` }, 'Their decisions'), h('a', { class: 'button', href: `#/sessions/?user=${encodeURIComponent(it.name)}` }, 'Their sessions')),
        h('dl', { class: 'figures' }, rows.map(([name], at) => h('div', null, h('dt', null, name), detail.cells[at]))));
    }
    rows.forEach(([, text], at) => put(detail.cells[at], text));
  }

  function showWaiting(here) {
    const others = (live.replicas?.replicas ?? []).filter((it) => !it.is_asked && isFresh(it) && it.figures.longest)
      .map((it) => ({ user: it.figures.longest.user ?? it.figures.longest.user_key, waited_ms: it.figures.longest.waited_ms, replica: it.id, requests: null }));
    const all = [...here.waiting.map((it) => ({ ...it, replica: here.replica })), ...others].sort((a, b) => b.waited_ms - a.waited_ms);
    // A user may wait at several replicas.
    const list = [...new Map(all.reverse().map((it) => [it.user, it])).values()].reverse().slice(0, 5);
    if (!list.length) { swap(waiting, h('div', { class: 'banner good' }, 'The queue is empty: every request found a backend with room at once.')); return; }
    swap(waiting, h('div', { class: 'card' }, h('h2', null, 'Waiting longest'), h('ol', { class: 'ranks' }, list.map((it) => h('li', null, h('strong', null, it.user), h('span', { class: 'num' }, ms(it.waited_ms)),
      h('span', { class: 'note' }, `at replica ${it.replica}${it.requests ? `, ${plural(it.requests, 'request')}` : ', the longest there'}`))))));
  }

  let cursor = '';
  // Users seen since the first page. Users missing after the last page are gone.
  let seen = new Set();
  const take = (it) => { known.set(it.key, it); seen.add(it.key); };
  every(1000, signal, async () => {
    const here = await get('/admin/v1/waiting?limit=1000', signal);
    waits = new Map(here.waiting.map((it) => [it.user, it.waited_ms]));
    showWaiting(here);
    // One page of all users per second, in a cycle: 10,000 are read in ten.
    do {
      const page = await get(`/admin/v1/users?limit=1000${cursor ? `&cursor=${cursor}` : ''}`, signal);
      page.users.forEach(take);
      cursor = page.next_cursor ?? '';
      if (!cursor) {
        [...known.keys()].filter((it) => !seen.has(it)).forEach((it) => known.delete(it));
        seen = new Set();
      }
    } while (cursor && !isWhole);
    isWhole = true;
    show();
  }, (fault) => { if (!known.size) put(summary, fault.message); });
  get('/admin/v1/admission', signal).then((it) => { isUncachedOnly = it.config.charge === 'uncached'; }, () => {});
  watch(signal, (what) => {
    if (what === 'written' && open) get(pathOfUser(open), signal).then((it) => { take(it); show(); }, () => {});
  });
}

function cacheOf(scope) {
  if (!scope) return 'As by default';
  if (scope === 'isolated') return 'Kept apart';
  return scope === 'shared' ? 'Shared' : `Shared in ${scope.replace('group:', '')}`;
}

function left(it) {
  const parts = [];
  for (const [name, what] of [['requests', 'requests'], ['tokens', 'tokens'], ['concurrent', 'at once']]) {
    const limit = it.left[name];
    if (limit !== null && limit !== undefined) parts.push(`${typeof limit === 'object' ? count(limit.left ?? limit.remaining) : count(limit)} ${what}`);
  }
  if (it.budget_left?.day) parts.push(`${short(it.budget_left.day.left)} tokens today`);
  if (it.budget_left?.month) parts.push(`${short(it.budget_left.month.left)} tokens this month`);
  return parts.join(', ') || 'No limit';
}
