// What other policies would have chosen in this replica's last decisions.

import { call } from './api.js';
import { h, put, swap } from './dom.js';
import { count, duration, percent } from './format.js';
import { table } from './table.js';
import { POLICIES } from './words.js';

const DECISIONS = 1000;
const BACKENDS = 4;

const LACKS = { session: 'sessions', user_tokens: 'users’ recent tokens', learnt_prices: 'learnt prices' };

/** The busiest backends and their shares. */
function balance(byBackend) {
  const all = Object.values(byBackend).reduce((sum, it) => sum + it, 0);
  const busiest = Object.entries(byBackend).sort(([, a], [, b]) => b - a);
  const more = busiest.length - BACKENDS;
  return `${busiest.slice(0, BACKENDS).map(([id, it]) => `${id} ${percent(it / all)}`).join(', ')}${more > 0 ? `, ${more} more` : ''}`;
}

const times = (share) => (share ? `${share.toFixed(2)} ×` : '–');

const name = (row) => h('span', { title: POLICIES[row.name] }, row.name);

function rowsOf(answer) {
  const decided = { name: 'as decided', elsewhere: 0, lacks: [], ...answer.decided };
  return [decided, ...answer.policies.map((it) => ({ ...it, name: `${it.config.policy}${it.is_live ? ' (live)' : ''}` }))];
}

/** A card that sends its question when the button is pressed: a replica handles one at a time. */
export function whatIf(signal) {
  const note = h('p', { class: 'note', role: 'status' });
  const place = h('div');
  const button = h('button', { type: 'button', onclick: () => ask() }, 'Try all policies');
  const link = h('p', { class: 'note' }, 'Each decision is made again from what it saw, by itself. What a policy would build up over time, a simulation shows: ', h('code', null, 'quorate simulate --from-decisions'), '.');

  async function ask() {
    button.disabled = true;
    put(note, 'Deciding again …');
    try {
      const answer = await call('POST', '/admin/v1/policy/what-if', { body: { decisions: DECISIONS }, signal });
      if (answer.decisions === 0) {
        swap(place);
        put(note, answer.left_out ? `None of the last ${count(answer.left_out)} requests can be decided again: more than 64 backends, two at once, or none.` : 'This replica has decided nothing yet.');
        return;
      }
      const span = duration((answer.until_ms - answer.from_ms) / 1000);
      put(note, `${count(answer.decisions)} decisions of replica ${answer.replica}, within ${span}; ${count(answer.choices)} had more than one backend to choose from. Engines reported ${percent(answer.reported_hit_rate, 1)} of the prompt tokens cached.${answer.left_out ? ` ${count(answer.left_out)} cannot be decided again.` : ''}`);
      const columns = [
        { title: 'Policy', head: true, by: (row) => row.name, make: () => { const node = h('span'); return { node, update: (row) => swap(node, name(row)) }; } },
        { title: 'Elsewhere', number: true, by: (row) => row.elsewhere, text: (row) => percent(row.elsewhere / answer.decisions, 1) },
        { title: 'Predicted hits', number: true, by: (row) => row.predicted_hit_rate, text: (row) => percent(row.predicted_hit_rate, 1) },
        { title: 'Busiest', number: true, by: (row) => row.busiest_share, text: (row) => times(row.busiest_share) },
        { title: 'Requests by backend', wide: true, text: (row) => balance(row.by_backend) },
        { title: 'Not known', wide: true, text: (row) => row.lacks.map((it) => LACKS[it] ?? it).join(', ') },
      ];
      const grid = table({ label: 'What policies would have chosen', columns, key: (row) => row.name, sort: { at: 2, down: true } });
      swap(place, grid.node);
      grid.set(rowsOf(answer));
    } catch (fault) {
      if (!signal.aborted) put(note, fault.message);
    } finally {
      button.disabled = false;
    }
  }

  return h('section', { class: 'card' },
    h('div', { class: 'row' }, h('h2', null, `What would others have done with the last ${count(DECISIONS)} decisions?`), h('span', { class: 'grow' }), button),
    link, note, place);
}
