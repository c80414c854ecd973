// The policies for routing and admission, and how to change them.

import { every, get } from './api.js';
import { confirm } from './actions.js';
import { h, put, swap } from './dom.js';
import { value } from './format.js';
import { may, watch } from './live.js';
import { whatIf } from './what-if.js';
import { POLICIES } from './words.js';

export const title = 'Policy';

const settings = (config, without = []) => h('dl', { class: 'figures wide-figures' }, Object.entries(config).filter(([name]) => !without.includes(name)).map(([name, it]) => h('div', null, h('dt', null, h('code', null, name)), h('dd', null, value(it)))));

function change(now) {
  const select = h('select', { id: 'policy' }, Object.keys(POLICIES).map((name) => h('option', { value: name, selected: name === now.policy }, name)));
  const text = h('textarea', { id: 'settings', rows: 8, spellcheck: 'false' });
  const own = ({ policy, ...rest }) => rest;
  const fill = () => { text.value = select.value === now.policy ? JSON.stringify(own(now), null, 2) : '{}'; };
  select.addEventListener('change', fill);
  fill();
  const read = () => ({ policy: select.value, ...JSON.parse(text.value || '{}') });
  confirm({
    title: 'Change the policy',
    effect: () => {
      let next;
      try { next = read(); } catch { return ['The settings are not JSON yet.']; }
      if (next.policy !== now.policy) return [`Every replica decides by ${next.policy} in place of ${now.policy}, from one log index on. Requests under way stay where they are.`, POLICIES[next.policy], 'Settings that are left out have their defaults.'];
      const changed = Object.keys({ ...now, ...next }).filter((name) => JSON.stringify(now[name]) !== JSON.stringify(next[name]));
      return changed.length ? changed.map((name) => `${name}: ${value(now[name])} becomes ${name in next ? value(next[name]) : 'its default'}, on every replica from one log index on.`) : ['Nothing changes.'];
    },
    fields: [h('label', { class: 'field', for: 'policy' }, 'Policy', select), h('label', { class: 'field', for: 'settings' }, 'Its settings, as JSON', text)],
    verb: 'Change the policy',
    request: () => {
      let body;
      try { body = read(); } catch (fault) { throw new Error(`The settings are not JSON: ${fault.message}`); }
      return { method: 'PUT', path: '/admin/v1/policy', body };
    },
    done: 'The policy is changed',
  });
}

export function mount(root, signal) {
  let now;
  let seen = '';
  const note = h('p', { class: 'note', role: 'status' }, 'Reading the policy …');
  const question = whatIf(signal);
  swap(root, note);
  const look = async () => {
    const [policy, routing, admission] = await Promise.all(['policy', 'routing', 'admission'].map((it) => get(`/admin/v1/${it}`, signal)));
    now = policy.config;
    const text = JSON.stringify([policy.config, routing.config, admission.config]);
    if (text === seen) return;
    seen = text;
    const models = Object.entries(routing.config.models);
    swap(root,
      h('section', { class: 'card' }, h('div', { class: 'row' }, h('h2', null, 'Requests are routed by ', h('code', null, now.policy)), h('span', { class: 'grow' }), may('operator') && h('button', { type: 'button', onclick: () => change(now) }, 'Change …')),
        h('p', null, POLICIES[now.policy] ?? ''), Object.keys(now).length > 1 ? settings(now, ['policy']) : h('p', { class: 'empty' }, 'It has no settings.')),
      question,
      h('section', { class: 'card' }, h('h2', null, 'Models with a policy of their own'), models.length ? models.map(([name, it]) => h('div', null, h('h3', null, name, ': ', h('code', null, it.policy)), settings(it, ['policy']))) : h('p', { class: 'empty' }, 'None: the policy above decides for all.')),
      h('section', { class: 'card' }, h('h2', null, 'Other routing settings'), settings(routing.config, ['models'])),
      h('section', { class: 'card' }, h('h2', null, 'Admission'), h('p', null, 'Who goes first when requests wait, and how many a backend gets at once.'), settings(flat(admission.config))));
  };
  every(5000, signal, look, (fault) => { if (!seen) put(note, fault.message); });
  watch(signal, (what) => { if (what === 'written') look().catch(() => {}); });
}

/** Flattens nested settings to their full names. */
const flat = (config, before = '') => Object.fromEntries(Object.entries(config).flatMap(([name, it]) => (it && typeof it === 'object' && !Array.isArray(it) ? Object.entries(flat(it, `${before}${name}.`)) : [[`${before}${name}`, it]])));
