//! Routes of what replicas were asked: recordings, and what another policy would have done.

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
            "Recordings of what this replica was asked, the newest first.",
            || served(recordings::list),
        ),
        post(
            "startRecording",
            OPERATOR,
            "Records what this replica is asked, until it is long enough. One at a time; no text \
 and no name is in it.",
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
            "Ends a recording and drops it.",
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
        "Ends a recording, which stays.",
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
