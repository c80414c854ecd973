// The frame: sign-in, pages, connection state, light and dark theme.

import { ApiError, get, hooks, token } from './api.js';
import { attr, h, icon, put, swap } from './dom.js';
import { time } from './format.js';
import { READINESS, begin, live, watch } from './live.js';
import * as overview from './page-overview.js';
import * as backends from './page-backends.js';
import * as ownership from './page-ownership.js';
import * as users from './page-users.js';
import * as sessions from './page-sessions.js';
import * as decisions from './page-decisions.js';
import * as policy from './page-policy.js';
import * as log from './page-log.js';
import * as config from './page-config.js';

const PAGES = { overview, backends, ownership, users, sessions, decisions, policy, log, config };
const main = document.getElementById('main');
const side = document.getElementById('side');
const topBar = document.getElementById('top');
const nothing = () => new AbortController();
let session = nothing();
let page = nothing();

/** Light or dark theme, by system setting or the reader's choice. */
function themeSwitch() {
  const root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (root.dataset.theme ?? (system.matches ? 'dark' : 'light')) === 'dark';
  const label = () => attr(button, 'aria-label', isDark() ? 'Use light colours' : 'Use dark colours');
  const button = h('button', {
    type: 'button', class: 'plain', onclick: () => {
      root.dataset.theme = isDark() ? 'light' : 'dark';
      localStorage.setItem('quorate-theme', root.dataset.theme);
      label();
    },
  }, icon('sun'));
  label();
  return button;
}

function header(signal) {
  const leader = h('span', { class: 'leader' });
  const dot = h('span', { class: 'dot', 'aria-hidden': 'true' });
  const state = h('span', null, 'Connecting');
  const pill = h('span', { class: 'status wait live', role: 'status' }, dot, state);
  const show = () => {
    const age = Math.round((Date.now() - live.answeredAt) / 1000);
    const isLost = live.isLost || (live.answeredAt > 0 && age > 12 && !document.hidden);
    const it = live.replicas;
    const [word, kind] = it ? READINESS[it.readiness.status] : ['Connecting', 'wait'];
    attr(pill, 'class', `status live ${isLost ? 'bad' : kind}`);
    put(state, isLost ? `Connection lost, last answer ${time(live.answeredAt)}` : it ? `${word}, updated ${time(live.answeredAt)}` : word);
    put(leader, it ? (it.leader ? `Replica ${it.leader} leads term ${it.term}` : 'No leader') : '');
  };
  const timer = setInterval(show, 1000);
  signal.addEventListener('abort', () => clearInterval(timer));
  watch(signal, show);
  const me = live.me;
  const who = h('span', { class: 'who' }, me.name ? `${me.name} · ${me.role}` : `Replica ${me.replica}`, me.role === 'viewer' && h('span', { class: 'tag' }, 'Read only'));
  const out = token.get() && h('button', { type: 'button', class: 'plain', onclick: () => { token.set(); start(); } }, 'Sign out');
  swap(topBar, brand(), leader, h('span', { class: 'grow' }), pill, who, out, themeSwitch());
  show();
}

const brand = () => h('a', { class: 'brand', href: '#/overview' }, h('img', { src: '/console/icon.svg', alt: '', width: 22, height: 22 }), 'Quorate');

function navigation() {
  swap(side, Object.entries(PAGES).map(([name, it]) => h('a', { href: `#/${name}`, 'data-page': name }, icon(name), h('span', null, it.title))));
}

/** Decodes a part of the address; returns it unchanged if it is not validly encoded. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Parses the address: `#/decisions/ID` is ['decisions', 'ID'], and a part that begins with `?` is a query. */
const place = () => location.hash.replace(/^#\//, '').split('/')
  .map((it) => (it.startsWith('?') ? new URLSearchParams(it.slice(1)) : decoded(it)));

function go() {
  page.abort();
  page = nothing();
  const [name, ...rest] = place();
  const known = PAGES[name] ? name : 'overview';
  const { title, mount } = PAGES[known];
  side.querySelectorAll('a').forEach((it) => attr(it, 'aria-current', it.dataset.page === known && 'page'));
  side.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  document.title = `${title} · Quorate`;
  const lost = lostBanner(page.signal);
  const body = h('div', { class: 'page' });
  swap(main, lost, h('h1', null, title), body);
  mount(body, page.signal, rest);
}

/** Creates a banner that reports a lost connection and links to the other replicas. */
function lostBanner(signal) {
  const links = h('span', { class: 'links' });
  const note = h('div', { class: 'banner bad', role: 'alert', hidden: true },
    h('div', null, h('strong', null, `Replica ${live.me.replica} does not answer. `), 'What is shown is from before; it is tried again all the time. ', links));
  const show = () => {
    note.hidden = !live.isLost;
    const others = (live.replicas?.replicas ?? []).filter((it) => !it.is_asked && it.admin);
    swap(links, others.map((it) => h('a', { href: `${it.admin}/${location.hash}` }, `Console of replica ${it.id}`)));
  };
  watch(signal, (what) => what === 'connection' && show());
  show();
  return note;
}

function signIn(message) {
  session.abort();
  page.abort();
  swap(side);
  swap(topBar, brand(), h('span', { class: 'grow' }), themeSwitch());
  document.title = 'Sign in · Quorate';
  const fault = h('p', { class: 'fault', role: 'alert', hidden: !message }, message ?? '');
  const input = h('input', { type: 'password', id: 'token', autocomplete: 'off', required: true, spellcheck: 'false' });
  const form = h('form', {
    class: 'card sign-in', onsubmit: async (submitted) => {
      submitted.preventDefault();
      token.set(input.value.trim());
      await start(true);
    },
  }, h('h1', null, 'Sign in'), h('p', { class: 'note' }, 'This listener asks for an operator’s token. ', h('code', null, 'quorate token create'), ' makes one. It is kept until you close this tab.'),
  h('label', { class: 'field', for: 'token' }, 'Token', input), fault, h('button', { type: 'submit', class: 'primary' }, 'Sign in'));
  swap(main, form);
  input.focus();
}

async function start(isTry = false) {
  session.abort();
  session = nothing();
  hooks.onunauthorized = () => {};
  try {
    live.me = await get('/admin/v1/whoami', session.signal);
  } catch (fault) {
    if (fault.name === 'AbortError') return;
    if (!(fault instanceof ApiError) || fault.status === 0) {
      swap(main, h('p', { class: 'banner bad', role: 'alert' }, 'The replica does not answer. It is tried again.'));
      setTimeout(start, 2000);
      return;
    }
    const isWrong = fault.status === 401 && token.get();
    token.set();
    signIn(isWrong ? 'No operator has this token.' : fault.status === 401 ? undefined : fault.message);
    return;
  }
  hooks.onunauthorized = () => { token.set(); signIn('The token is not taken any more.'); };
  begin(session.signal);
  header(session.signal);
  navigation();
  go();
  if (isTry) main.focus();
}

const chosen = localStorage.getItem('quorate-theme');
if (chosen) document.documentElement.dataset.theme = chosen;
addEventListener('hashchange', () => { if (live.me && side.children.length) { go(); main.focus({ preventScroll: true }); scrollTo(0, 0); } });
start();
