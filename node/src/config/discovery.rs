//! Checks of `[[discovery]]`, the sources of engines.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use api::engines::discovery::{
    DnsSource, EngineTemplate, KubernetesAccess, KubernetesSource, PodChoice, SourceKind,
    SourceSettings,
};
use api::prompt::ModelSettings;
use state::command::{BackendSpec, Rejection};
use state::discovery::{SourceRules, is_source};

use super::file::DiscoveryConfig;
use super::read::Settings;

/// Keys that are only valid for some kinds of sources, with these kinds.
const KEYS_OF: [(&str, &[&str]); 11] = [
    ("name", &["dns"]),
    ("interval", &["dns"]),
    ("resolver", &["dns"]),
    ("path", &["file"]),
    ("namespace", &["kubernetes"]),
    ("selector", &["kubernetes"]),
    ("inference_pool", &["kubernetes"]),
    ("port", &["kubernetes"]),
    ("scheme", &["dns", "kubernetes"]),
    ("kv_events_port", &["dns", "kubernetes"]),
    ("kv_replay_port", &["dns", "kubernetes"]),
];

/// Whether sources of this kind have the key.
pub(super) fn has_key(kind: &str, key: &str) -> bool {
    let mut restricted = KEYS_OF.iter();
    restricted.all(|(name, kinds)| *name != key || kinds.contains(&kind))
}

/// Returns the settings of all sources, which are only valid if there are no errors.
pub(super) fn sources(
    sources: &[DiscoveryConfig],
    models: &[ModelSettings],
    found: &mut Settings,
) -> Vec<SourceSettings> {
    // An entry with neither id nor kind is reported as such, not as a duplicate.
    let ids = sources.iter().enumerate().map(|(nth, source)| {
        let id = Some(source.id()).filter(|id| !id.is_empty());
        id.map_or_else(|| format!("#{nth}"), str::to_owned)
    });
    let ids: Vec<String> = ids.collect();
    found.unique("discovery", "id", ids.iter().map(String::as_str));
    let has_tokens = models.iter().any(|model| !model.tokenizer.is_character());
    let mut settings = Vec::new();
    for (nth, source) in sources.iter().enumerate() {
        let path = format!("discovery[{nth}]");
        if !found.is_sound(&path) {
            continue;
        }
        check_keys(&path, source, found);
        check_common(&path, source, has_tokens, found);
        let kind = match &*source.kind {
            "dns" => dns(&path, source, found).map(SourceKind::Dns),
            "file" => file(&path, source, found).map(SourceKind::File),
            _ => kubernetes(&path, source, found).map(SourceKind::Kubernetes),
        };
        settings.extend(kind.map(|kind| source.settings(kind)));
    }
    settings
}

impl DiscoveryConfig {
    fn id(&self) -> &str {
        self.id.as_deref().unwrap_or(&self.kind)
    }

    fn settings(&self, kind: SourceKind) -> SourceSettings {
        let millis = self.remove_after.as_millis();
        SourceSettings {
            rules: SourceRules {
                source: self.id().to_owned(),
                remove_after_ms: u64::try_from(millis).unwrap_or(u64::MAX),
                lost_permille_max: self.max_remove_fraction,
            },
            template: EngineTemplate {
                source: self.id().to_owned(),
                models: self.models.clone(),
                labels: self.labels.clone(),
                role: self.role,
                scheme: self.scheme,
                kv_events_port: self.kv_events_port,
                kv_replay_port: self.kv_replay_port,
            },
            kind,
        }
    }
}

/// Rejects keys that are not valid for the source's kind.
fn check_keys(path: &str, source: &DiscoveryConfig, found: &mut Settings) {
    for (key, kinds) in KEYS_OF {
        let path = format!("{path}.{key}");
        if found.places.contains_key(&path) && !kinds.contains(&&*source.kind) {
            let message = format!("{path} is set, and kind is {:?}", source.kind);
            let expected = format!("it where kind is {}", kinds.join(" or "));
            found.refuse(&path, message, &expected);
        }
    }
}

fn check_common(path: &str, source: &DiscoveryConfig, has_tokens: bool, found: &mut Settings) {
    let id = source.id();
    if !is_source(id) {
        let path = format!("{path}.id");
        let message = format!("{path} is {id:?}");
        found.refuse(&path, message, "1 to 64 characters of [A-Za-z0-9._-]");
    }
    // The settings that all engines share are checked once, with a sample backend.
    let sample = BackendSpec {
        id: "engine".to_owned(),
        url: format!("http://{}:1", Ipv4Addr::LOCALHOST),
        models: source.models.clone(),
        labels: source.labels.clone(),
        capacity_blocks: None,
        kv_events: None,
        kv_replay: None,
        role: source.role,
    };
    if let Err(Rejection::Invalid { field, expected }) = sample.validate() {
        let key = field.split(['.', '[']).next().unwrap_or(&field);
        let message = format!("{path}.{field} is out of bounds");
        found.refuse(&format!("{path}.{key}"), message, &expected);
    }
    if source.kv_replay_port.is_some() && source.kv_events_port.is_none() {
        let path = format!("{path}.kv_replay_port");
        found.refuse(&path, format!("{path} is set"), "kv_events_port beside it");
    }
    if source.kv_events_port.is_some() && !has_tokens && found.is_sound("models") {
        let path = format!("{path}.kv_events_port");
        let expected = "a [[models]] entry with another tokenizer than \"character\": KV events \
                        contain token ids";
        found.refuse(&path, format!("{path} without a tokenizer"), expected);
    }
}

fn dns(path: &str, source: &DiscoveryConfig, found: &mut Settings) -> Option<DnsSource> {
    let name = required(path, "name", source.name.as_deref(), found)?;
    let is_service = name.starts_with('_');
    let (host, port) = match (is_service, name.rsplit_once(':')) {
        (true, None) => (name, None),
        (false, Some((host, port))) => (host, port.parse().ok().filter(|port| *port > 0)),
        (true, Some(_)) | (false, None) => ("", None),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_name = !host.is_empty() && host.len() <= 253 && host.chars().all(is_plain);
    if !is_name || (port.is_none() && !is_service) {
        let path = format!("{path}.name");
        let expected = match is_service {
            true => "a name of service records, such as \"_http._tcp.engines.internal\"",
            false => "a name with a port, such as \"engines.prod.svc:8000\"",
        };
        found.refuse(&path, format!("{path} is {name:?}"), expected);
        return None;
    }
    Some(DnsSource {
        name: host.to_owned(),
        port,
        interval: source.interval,
        resolver: source.resolver,
    })
}

fn file(path: &str, source: &DiscoveryConfig, found: &mut Settings) -> Option<PathBuf> {
    let file = source.path.as_ref().and_then(|it| it.to_str());
    required(path, "path", file, found).map(PathBuf::from)
}

fn kubernetes(
    path: &str,
    source: &DiscoveryConfig,
    found: &mut Settings,
) -> Option<KubernetesSource> {
    let pods = match (&source.selector, &source.inference_pool) {
        (Some(selector), None) => PodChoice::Selector(selector.clone()),
        (None, Some(pool)) => PodChoice::Pool(pool.clone()),
        (Some(_), Some(_)) => {
            let path = format!("{path}.inference_pool");
            let message = format!("{path} is set beside selector");
            found.refuse(&path, message, "one of the two");
            return None;
        }
        (None, None) => {
            let message = format!("{path} has neither selector nor inference_pool");
            found.refuse(path, message, "one of the two");
            return None;
        }
    };
    let names = [&source.namespace, &source.inference_pool];
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
    for (key, name) in ["namespace", "inference_pool"].into_iter().zip(names) {
        if name
            .as_ref()
            .is_some_and(|name| !name.chars().all(is_plain))
        {
            let path = format!("{path}.{key}");
            let message = format!("{path} is not a valid object name");
            found.refuse(&path, message, "letters, digits, `-` and `.`");
        }
    }
    if matches!(pods, PodChoice::Selector(_)) && source.port.is_none() {
        let message = format!("{path}.port is not set");
        found.refuse(path, message, "the port of the engines, beside selector");
    }
    Some(KubernetesSource {
        access: KubernetesAccess {
            namespace: source.namespace.clone(),
            ..KubernetesAccess::default()
        },
        pods,
        port: source.port,
    })
}

/// Returns the value of a required key. Adds an error if it is not set.
fn required<'a>(
    path: &str,
    key: &str,
    value: Option<&'a str>,
    found: &mut Settings,
) -> Option<&'a str> {
    if value.is_none() {
        let message = format!("{path}.{key} is not set");
        found.refuse(path, message, &format!("{key} for this kind"));
    }
    value
}
