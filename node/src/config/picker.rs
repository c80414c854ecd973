//! Checks `[epp]`, and converts it to the settings of the picker.

use api::proxy::picker::{BodyModes, PickerSettings};
use http::HeaderName;

use super::file::ConfigFile;
use super::read::Settings;

/// Returns the settings of the picker.
pub(super) fn settings(file: &ConfigFile, found: &mut Settings) -> PickerSettings {
    let epp = &file.epp;
    let path = "epp.destination";
    let destination = HeaderName::try_from(&epp.destination).unwrap_or_else(|_| {
        if found.is_sound(path) {
            let message = format!("{path} is {:?}", epp.destination);
            found.refuse(path, message, "the name of a header");
        }
        PickerSettings::default().destination
    });
    PickerSettings {
        endpoints_max: epp.endpoints,
        destination,
        namespace: epp.namespace.clone(),
        served: epp.served.clone(),
        subset_namespace: epp.subset_namespace.clone(),
        subset: epp.subset.clone(),
        untold_bodies: BodyModes {
            requests: epp.request_bodies.mode(),
            answers: epp.answer_bodies.mode(),
        },
    }
}
