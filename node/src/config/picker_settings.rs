//! Checks `[picker]`, and converts it to the settings of the endpoint picker.

use api::proxy::picker::{BodyModes, PickerSettings};
use http::HeaderName;

use super::file::ConfigFile;
use super::read::Settings;

/// Returns the settings of the picker.
pub(super) fn settings(file: &ConfigFile, found: &mut Settings) -> PickerSettings {
    let picker = &file.picker;
    let path = "picker.destination";
    let destination = HeaderName::try_from(&picker.destination).unwrap_or_else(|_| {
        if found.is_sound(path) {
            let message = format!("{path} is {:?}", picker.destination);
            found.refuse(path, message, "the name of a header");
        }
        PickerSettings::default().destination
    });
    PickerSettings {
        endpoints_max: picker.endpoints,
        destination,
        namespace: picker.namespace.clone(),
        served: picker.served.clone(),
        subset_namespace: picker.subset_namespace.clone(),
        subset: picker.subset.clone(),
        untold_bodies: BodyModes {
            requests: picker.request_bodies.mode(),
            answers: picker.answer_bodies.mode(),
        },
    }
}
