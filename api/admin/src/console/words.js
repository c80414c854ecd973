// The API's names explained in sentences, with the terms of docs/GLOSSARY.md.

export const ROLES = {
  leader: 'Leader', follower: 'Follower', candidate: 'Candidate', learner: 'Learner',
  forming: 'Forming', removed: 'Removed', stopped: 'Stopped',
};

/** Why a backend was chosen: a short label, and the end of a sentence "…, because". */
export const REASONS = {
  'only-candidate': ['Only candidate', 'it was the only backend that could take it'],
  'least-cost': ['Least cost', 'the first token was predicted soonest there'],
  'least-requests': ['Fewest requests', 'it had the fewest requests'],
  jitter: ['Tie', 'several were about equally good, and the request’s id decided among them'],
  imbalanced: ['Load imbalanced', 'the load was uneven, so that it went where the fewest requests were'],
  'longest-prefix': ['Longest prefix', 'it held the longest prefix among backends with an acceptable load'],
  'best-score': ['Best score', 'it had the best weighted score'],
  ring: ['Ring', 'it was the first on the ring with room'],
  session: ['Session', 'it is the backend of this session'],
  turn: ['Turn', 'it was next in turn'],
  'least-kv': ['Least KV cache used', 'it used the least of its KV cache'],
  'user-share': ['User’s share', 'it was nearest to the user’s position'],
  home: ['Home', 'it was as good as others, and the session was there before'],
  exploit: ['Prefix held', 'it held most of the prompt'],
  explore: ['Least load', 'nobody held much of the prompt, and it cost the least there'],
};

export const VERDICTS = {
  candidate: 'Could take it',
  'other-model': 'Serves other models',
  'not-offered': 'Not among the endpoints that the gateway offers',
  tried: 'Was tried already',
  unhealthy: 'Not healthy',
  draining: 'Draining',
  'circuit-open': 'Circuit open',
  'other-role': 'Has another role',
  'not-loaded': 'Model not loaded',
  'other-labels': 'Lacks a label asked for',
  unsalted: 'Would not keep the user’s blocks apart',
  'too-small': 'Cache too small for the prompt',
  'not-resident': 'Adapter not in memory',
  'at-limit': 'At its limit',
};

export const MODES = {
  exact: ['Exact', 'Owned blocks are what the engine’s KV events say.'],
  degraded: ['Degraded', 'What KV events told may be out of date.'],
  lease: ['Lease', 'Owned blocks follow from the requests sent there.'],
};

export const OUTCOMES = {
  finished: 'Answered', local: 'Answered here', refused: 'Refused', failed: 'Failed',
  'engine-error': 'Engine’s error', 'broken-off': 'Broken off', 'client-left': 'Client left',
  'gateway-reply': 'Gateway’s own reply',
};

/** How attempts end, other than with a complete answer. */
export const ATTEMPT_ENDS = { broken: 'then it broke off', moved: 'then the stream moved on', 'client-left': 'then the client left', failed: 'it failed' };

export const POLICIES = {
  cost: 'Least predicted time to first token: uncached prompt tokens, load, what must be evicted.',
  lmetric: 'Least product of prefill tokens and requests.',
  'prefix-cache': 'Longest prefix within one load deviation, unless the load is imbalanced (AIBrix).',
  'vllm-cache-aware': 'Longest prefix above a threshold, with bounded load.',
  epp: 'Weighted scores of prefix, queue and KV usage (Gateway API endpoint picker).',
  chwbl: 'Consistent hashing with bounded loads over the first blocks.',
  session: 'One backend per session.',
  'preble-e2': 'Longest prefix, or least cost of load, eviction and prefill (Preble).',
  'vtc-basic': 'Each user’s recent tokens choose a position among the backends (AIBrix).',
  'least-request': 'Fewest requests.',
  'power-of-two': 'The less loaded of two candidates drawn at random.',
  'round-robin': 'In turn, per replica.',
  random: 'A random candidate.',
  'least-kv': 'Least KV cache used.',
};

/** An event as a sentence, with its tone: `good`, `bad` or none. */
export function event(it) {
  switch (it.event) {
    case 'leader': return it.leader ? [`Replica ${it.leader} leads term ${it.term}`, 'good'] : ['No leader', 'bad'];
    case 'role': return [`This replica is ${(ROLES[it.role] ?? it.role).toLowerCase()}`];
    case 'quorum': return it.has_quorum ? ['A quorum answers', 'good'] : ['No quorum answers', 'bad'];
    case 'member': return [`Replica ${it.id} ${it.change === 'disconnected' ? 'does not answer' : it.change === 'connected' ? 'answers' : `was ${it.change}`}`, { connected: 'good', disconnected: 'bad', removed: 'bad' }[it.change]];
    case 'snapshot': return [`Snapshot at index ${it.index}`];
    case 'fault': return [`Storage fault: ${it.detail}`, 'bad'];
    case 'backend': return [`Backend ${it.id}: ${it.change}`, { removed: 'warn', draining: 'warn' }[it.change]];
    case 'backend-health': return it.is_healthy ? [`Backend ${it.id} is healthy`, 'good'] : [`Backend ${it.id} is not healthy: ${it.detail ?? 'no answer'}`, 'bad'];
    case 'backend-circuit': return it.is_open ? [`Circuit of ${it.id} opened`, 'bad'] : [`Circuit of ${it.id} closed`, 'good'];
    case 'backend-accuracy': return it.is_off ? [`Predictions for ${it.id} are off by ${Math.round(it.error_percent)} %`, 'bad'] : [`Predictions for ${it.id} hold again`, 'good'];
    case 'routing': return ['Routing settings replaced'];
    case 'policy': return [`Policy is ${it.config?.policy}`];
    case 'ownership': return [`Ownership of ${it.id} is ${it.mode}${it.reason ? `: ${it.reason}` : ''}`];
    case 'digest-mismatch': return [`Replica ${it.peer} has another state at index ${it.index}`, 'bad'];
    case 'missed': return [it.events === null ? 'This replica has started anew: events before are not known' : `${it.events} events were missed`, 'bad'];
    default: return [it.event];
  }
}

export const ACTIONS = {
  'found-cluster': 'Cluster founded, with the settings of a config',
  'put-backend': 'Put backend', 'delete-backend': 'Remove backend', 'drain': 'Drain backend', 'drain-moving-streams': 'Drain and move streams',
  'undrain': 'Undrain backend', 'put-policy': 'Set policy', 'put-routing': 'Set routing', 'put-admission': 'Set admission',
  'configure-user': 'Configure user', 'put-user-defaults': 'Set defaults of users', 'delete-user': 'Delete user', 'forgive-user': 'Forgive user', 'end-tree': 'End tree of sessions',
};
