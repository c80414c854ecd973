//! Checks `[tls]`. The files are read when a config is checked, so that a fault is found before a
//! replica starts, and again when it starts.

use std::path::PathBuf;

use api::net::tls::{CertificateSource, ListenerFiles, TlsSetupError};
use state::ids::ReplicaId;

use super::file::ConfigFile;
use super::read::Settings;
use super::tls::{AdminTlsConfig, PickerTlsConfig, TlsConfig};

/// Checks that the files in `[tls]` are complete and usable. Those of `[tls.peer]` must be for
/// replica `id`, and are not read if it is `None`.
pub(super) fn check(file: &ConfigFile, id: Option<ReplicaId>, found: &mut Settings) {
    let TlsConfig {
        data,
        admin,
        picker,
        peer,
        backends,
    } = &file.tls;
    check_picker(picker, found);
    let keys = [
        ("cert_file", backends.cert_file.is_some()),
        ("key_file", backends.key_file.is_some()),
    ];
    if are_whole("tls.backends", &keys, 2, found)
        && let Some(files) = backends.files()
    {
        refuse(files.load().err(), found);
    }
    let keys = [
        ("cert_file", data.cert_file.is_some()),
        ("key_file", data.key_file.is_some()),
        ("client_ca_file", data.client_ca_file.is_some()),
    ];
    if are_whole("tls.data", &keys, 2, found)
        && let Some(files) = data.files()
    {
        refuse(files.load().err(), found);
    }
    check_admin(admin, found);
    let keys = [
        ("cert_file", peer.cert_file.is_some()),
        ("key_file", peer.key_file.is_some()),
        ("ca_file", peer.ca_file.is_some()),
    ];
    let is_whole = are_whole("tls.peer", &keys, 3, found);
    let Some(id) = id.filter(|_| is_whole && found.is_sound("cluster.name")) else {
        return;
    };
    if let Some(files) = peer.files(&file.cluster.name, id.0) {
        if file.cluster.secret_file.is_some() && !file.cluster.authentication_optional {
            let message = "cluster.secret_file is set beside tls.peer.cert_file".to_owned();
            let expected = "one way for replicas to authenticate, or \
                            cluster.authentication_optional = true while the cluster moves to \
                            certificates";
            found.refuse("cluster.secret_file", message, expected);
        }
        refuse(files.load().err(), found);
    }
}

fn check_picker(picker: &PickerTlsConfig, found: &mut Settings) {
    check_listener(
        "tls.picker",
        [&picker.cert_file, &picker.key_file, &picker.client_ca_file],
        ("in_the_clear", picker.in_the_clear),
        "with TLS or without it, not both",
        || picker.files(),
        found,
    );
}

fn check_admin(admin: &AdminTlsConfig, found: &mut Settings) {
    check_listener(
        "tls.admin",
        [&admin.cert_file, &admin.key_file, &admin.client_ca_file],
        ("terminated_upstream", admin.terminated_upstream),
        "one place where TLS ends",
        || admin.files(),
        found,
    );
}

/// Checks the files of a listener, and that they are not combined with the key `clear`, which
/// declares that the listener does not use TLS.
fn check_listener(
    section: &str,
    [cert, key, client_ca]: [&Option<PathBuf>; 3],
    (clear, is_clear): (&str, bool),
    expected: &str,
    files: impl FnOnce() -> Option<ListenerFiles>,
    found: &mut Settings,
) {
    let keys = [
        ("cert_file", cert.is_some()),
        ("key_file", key.is_some()),
        ("client_ca_file", client_ca.is_some()),
    ];
    if !are_whole(section, &keys, 2, found) {
        return;
    }
    if let Some(files) = files() {
        if is_clear {
            let path = format!("{section}.{clear}");
            let message = format!("{path} is true beside {section}.cert_file");
            found.refuse(&path, message, expected);
        }
        refuse(files.load().err(), found);
    }
}

/// Whether the section sets none of `keys`, or at least the first `needed` ones. Otherwise adds an
/// error.
fn are_whole(section: &str, keys: &[(&str, bool)], needed: usize, found: &mut Settings) -> bool {
    let Some((set, _)) = keys.iter().find(|(_, is_set)| *is_set) else {
        return true;
    };
    let needed = &keys[..needed];
    let Some((missing, _)) = needed.iter().find(|(_, is_set)| !is_set) else {
        return true;
    };
    let path = format!("{section}.{set}");
    let message = format!("{path} is set, {section}.{missing} is not");
    let names: Vec<_> = needed.iter().map(|(name, _)| *name).collect();
    found.refuse(&path, message, &format!("all of {}", names.join(", ")));
    false
}

fn refuse(fault: Option<TlsSetupError>, found: &mut Settings) {
    if let Some(fault) = fault {
        found.refuse(&fault.key, fault.problem, &fault.expected);
    }
}
