// Reads every list of the admin API to its end with types generated from its description.
import createClient from "openapi-fetch";
import type { paths } from "./admin.js";

const [, , base] = process.argv;
const client = createClient<paths>({
  baseUrl: base,
  headers: { authorization: `Bearer ${process.env.QUORATE_TOKEN}` },
});

type Page = { next_cursor?: string | null };
type Query = { limit: number; cursor?: string };
type Answer<T> = { data?: T; error?: unknown };

async function readAll<T extends Page>(
  name: string,
  get: (query: Query) => Promise<Answer<T>>,
  entries: (page: T) => number,
): Promise<void> {
  let cursor: string | undefined;
  let pages = 0;
  let count = 0;
  do {
    const { data, error } = await get({ limit: 1, cursor });
    if (data === undefined) throw new Error(`${name}: ${JSON.stringify(error)}`);
    pages += 1;
    count += entries(data);
    cursor = data.next_cursor ?? undefined;
  } while (cursor !== undefined);
  if (pages < 2) throw new Error(`${name}: ${count} entries on ${pages} page`);
  console.log(`${name}: ${count} entries on ${pages} pages`);
}

await readAll(
  "backends",
  (query) => client.GET("/admin/v1/backends", { params: { query } }),
  (page) => page.backends.length,
);
await readAll(
  "users",
  (query) => client.GET("/admin/v1/users", { params: { query } }),
  (page) => page.users.length,
);
await readAll(
  "keys",
  (query) => client.GET("/admin/v1/keys", { params: { query } }),
  (page) => page.keys.length,
);
await readAll(
  "decisions",
  (query) => client.GET("/admin/v1/decisions", { params: { query } }),
  (page) => page.decisions.length,
);
await readAll(
  "audit",
  (query) => client.GET("/admin/v1/audit", { params: { query } }),
  (page) => page.writes.length + page.calls.length,
);
