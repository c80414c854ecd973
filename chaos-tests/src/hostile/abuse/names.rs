//! Requests that each carry a new user name.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::ensure;
use http::HeaderName;
use http::header::AUTHORIZATION;
use tokio::task::JoinSet;

use super::context::{ATTACKER, AbuseContext, FROM, chat, outcome};
use crate::hostile::client;

/// Number of user names, and maximum number of concurrent requests.
const NAMES: (usize, usize) = (1000, 24);

/// Sends each request under another user name. With API keys, the name has no effect. Without them,
/// no state kept per name may grow without bound.
pub(super) async fn made_up(context: &Arc<AbuseContext>) -> anyhow::Result<()> {
    let (count, at_once) = (NAMES.0 * context.scale, NAMES.1);
    let next = Arc::new(AtomicUsize::new(0));
    let mut all = JoinSet::new();
    for _ in 0..at_once {
        let (context, next) = (Arc::clone(context), Arc::clone(&next));
        all.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return anyhow::Ok(());
                }
                let mut asked = chat(ATTACKER, &format!("plain.{number}"), false);
                let name = format!("made-up-{number}");
                asked.set(HeaderName::from_static("x-quorate-user"), &name);
                if !context.access.is_secure() {
                    // The key would determine the user.
                    asked.headers.remove(AUTHORIZATION);
                }
                let to = context.data[number % context.data.len()];
                let (status, text) = outcome(client::ask(&context.access, FROM, to, asked)).await;
                let code = status.map_or(0, |status| status.as_u16());
                ensure!([200, 429, 503].contains(&code), "{name}: {code} {text}");
                context.count(code.to_string());
            }
        });
    }
    while let Some(ended) = all.join_next().await {
        ended??;
    }
    context.seen.take_heads();
    Ok(())
}
