//! Routes for recordings of requests, and for what-if evaluations of policies.

use super::super::describe::problems::{BUSY, NOT_FOUND, RECORDING, REFUSED, STOPPING};
use super::super::describe::served;
use super::super::{recordings, what_if};
use super::RouteInfo;
use super::call::{OPERATOR, VIEWER, delete, get, post};

pub(super) const RECORDINGS: RouteInfo = RouteInfo {
    path: "/admin/v1/recordings",
    calls: &[
        get(
            "getRecordings",
            VIEWER,
            "Recordings of this replica's requests, newest first.",
            || served(recordings::list),
        ),
        post(
            "startRecording",
            OPERATOR,
            "Records this replica's requests up to a limit. One at a time; it contains no texts and \
 no names.",
            || served(recordings::start),
        )
        .fails(&[RECORDING, REFUSED]),
    ],
};

pub(super) const LAST_RECORDING: RouteInfo = RouteInfo {
    path: "/admin/v1/recordings/last",
    calls: &[get(
        "getLastDecisionsAsRecording",
        VIEWER,
        "This replica's last decisions as a recording.",
        || served(recordings::last),
    )
    .fails(&[BUSY, REFUSED])],
};

pub(super) const RECORDING_FILE: RouteInfo = RouteInfo {
    path: "/admin/v1/recordings/{id}",
    calls: &[
        get(
            "getRecording",
            VIEWER,
            "A recording as a file of JSON lines; one that runs, as far as it is.",
            || served(recordings::fetch),
        )
        .fails(&[BUSY, NOT_FOUND]),
        delete(
            "deleteRecording",
            OPERATOR,
            "Ends a recording and deletes it.",
            || served(recordings::remove),
        )
        .fails(&[NOT_FOUND]),
    ],
};

pub(super) const STOP_RECORDING: RouteInfo = RouteInfo {
    path: "/admin/v1/recordings/{id}/stop",
    calls: &[post(
        "stopRecording",
        OPERATOR,
        "Ends a recording, and keeps it.",
        || served(recordings::stop),
    )
    .fails(&[NOT_FOUND])],
};

pub(super) const WHAT_IF: RouteInfo = RouteInfo {
    path: "/admin/v1/policy/what-if",
    calls: &[post(
        "whatIf",
        VIEWER,
        "What policies would have chosen in this replica's last decisions. Changes nothing.",
        || served(what_if::ask),
    )
    .fails(&[BUSY, STOPPING])],
};
