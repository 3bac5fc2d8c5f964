//! What can be counted of the webhook.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

const REVIEWS: &str = "hedgerow_webhook_reviews_total";
const DURATION: &str = "hedgerow_webhook_review_duration_seconds";
const RENEWALS: &str = "hedgerow_webhook_certificate_reloads_total";
const EXPIRY: &str = "hedgerow_webhook_certificate_expiry_timestamp_seconds";

/// An API server gives up after seconds; a review takes less than a millisecond.
const BUCKETS: [f64; 9] = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.025, 0.1, 1.0];

/// What became of a review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The pod gets a sidecar.
    Injected,
    /// It stays as it is.
    Skipped,
    /// It must not be made.
    Denied,
    /// It was no review.
    Invalid,
}

/// What became of a new certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Renewal {
    /// It is served.
    Applied,
    /// It cannot be.
    Rejected,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Injected, Self::Skipped, Self::Denied, Self::Invalid];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Injected => "injected",
            Self::Skipped => "skipped",
            Self::Denied => "denied",
            Self::Invalid => "invalid",
        }
    }
}

impl Renewal {
    const ALL: [Self; 2] = [Self::Applied, Self::Rejected];

    fn word(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Rejected => "rejected",
        }
    }
}

/// All of it.
pub(super) struct Metrics {
    handle: PrometheusHandle,
    reviews: [Counter; 4],
    renewals: [Counter; 2],
    duration: Histogram,
    expiry: Gauge,
}

impl Metrics {
    /// With nothing counted yet.
    pub(super) fn new() -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BUCKETS)
            .expect("there are buckets")
            .build_recorder();
        recorder.describe_counter(REVIEWS.into(), None, "Admission reviews, by what became of them.".into());
        let renewals = "New versions of the certificate's files, by what became of them.";
        recorder.describe_counter(RENEWALS.into(), None, renewals.into());
        recorder.describe_histogram(DURATION.into(), None, "From a whole review to its answer.".into());
        recorder.describe_gauge(EXPIRY.into(), None, "When the certificate that is served ends.".into());
        Self {
            handle: recorder.handle(),
            reviews: Outcome::ALL.map(|it| counter(&recorder, REVIEWS, "verdict", it.word())),
            renewals: Renewal::ALL.map(|it| counter(&recorder, RENEWALS, "result", it.word())),
            duration: recorder.register_histogram(&Key::from_static_name(DURATION), &METADATA),
            expiry: recorder.register_gauge(&Key::from_static_name(EXPIRY), &METADATA),
        }
    }

    /// Counts a review that was answered.
    pub(super) fn review(&self, outcome: Outcome, elapsed: Duration) {
        self.reviews[outcome as usize].increment(1);
        self.duration.record(elapsed);
    }

    /// Counts a new certificate.
    pub(super) fn renewal(&self, result: Renewal) {
        self.renewals[result as usize].increment(1);
    }

    /// Everything in Prometheus' text format, version 0.0.4. `expires` is the certificate's end, in seconds since 1970.
    pub(super) fn render(&self, expires: i64) -> String {
        self.expiry.set(expires as f64);
        self.handle.render()
    }

    /// Folds the observations since the last time into their buckets; to be called every few seconds.
    pub(super) fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

fn counter(
    recorder: &PrometheusRecorder,
    name: &'static str,
    label: &'static str,
    value: &'static str,
) -> Counter {
    let key = Key::from_parts(name, vec![Label::from_static_parts(label, value)]);
    recorder.register_counter(&key, &METADATA)
}
