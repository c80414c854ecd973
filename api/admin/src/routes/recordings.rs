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
            "Starts a recording of this replica's requests, which ends at a limit. It contains \
 neither texts nor names. Only one runs at a time.",
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
            "A recording as a file of JSON lines; if it is running, its requests so far.",
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
        "What other policies would have chosen for this replica's last requests. Changes nothing.",
        || served(what_if::ask),
    )
    .fails(&[BUSY, STOPPING])],
};
