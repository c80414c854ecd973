//! The calls of KEDA's external scaler.

use std::pin::Pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::{self, Stream};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::externalscaler::external_scaler_server::ExternalScaler;
use super::externalscaler::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec,
    MetricValue, ScaledObjectRef,
};
use super::{MODEL_KEY, Scaler, WANTED_METRIC};

/// Polling interval for changes of activity.
const WATCH_EVERY: Duration = Duration::from_millis(200);

/// The service, as one connection uses it.
#[derive(Clone)]
pub(super) struct ScalerService {
    pub(super) scaler: Scaler,
    /// Cancelled when this replica stops. This ends all watches.
    pub(super) stop: CancellationToken,
}

impl Scaler {
    /// Returns the number of wanted engines of the model that `object` names.
    fn wanted(&self, object: &ScaledObjectRef) -> Result<u32, Status> {
        let model = object.scaler_metadata.get(MODEL_KEY);
        let Some(model) = model.filter(|model| !model.is_empty()) else {
            let message = format!("the trigger's metadata has no {MODEL_KEY:?}");
            return Err(Status::invalid_argument(message));
        };
        if !(self.has_caught_up)() {
            return Err(Status::unavailable("the replica has not caught up"));
        }
        let capacity = self.view.capacity();
        if !capacity.knows(model) && !self.admission.knows_model(model) {
            let message = format!("no backend and no config names the model {model:?}");
            return Err(Status::not_found(message));
        }
        Ok(capacity.wanted(model))
    }

    fn activity(&self, object: &ScaledObjectRef) -> Result<bool, Status> {
        self.wanted(object).map(|wanted| wanted > 0)
    }
}

#[tonic::async_trait]
impl ExternalScaler for ScalerService {
    async fn is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<IsActiveResponse>, Status> {
        let result = self.scaler.activity(request.get_ref())?;
        Ok(Response::new(IsActiveResponse { result }))
    }

    type StreamIsActiveStream =
        Pin<Box<dyn Stream<Item = Result<IsActiveResponse, Status>> + Send + 'static>>;

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        let object = request.into_inner();
        let known = self.scaler.activity(&object)?;
        let first = stream::iter([Ok(IsActiveResponse { result: known })]);
        let (scaler, stop) = (self.scaler.clone(), self.stop.clone());
        let changes = stream::unfold(Some(known), move |last| {
            let (scaler, stop, object) = (scaler.clone(), stop.clone(), object.clone());
            async move {
                let last = last?;
                loop {
                    stop.run_until_cancelled(sleep(WATCH_EVERY)).await?;
                    match scaler.activity(&object) {
                        Ok(result) if result == last => {}
                        Ok(result) => return Some((Ok(IsActiveResponse { result }), Some(result))),
                        Err(status) => return Some((Err(status), None)),
                    }
                }
            }
        });
        Ok(Response::new(first.chain(changes).boxed()))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        self.scaler.wanted(request.get_ref())?;
        // One replica of the scaled object for each wanted engine.
        let spec = MetricSpec {
            metric_name: WANTED_METRIC.to_owned(),
            target_size: 1,
            target_size_float: 1.0,
        };
        Ok(Response::new(GetMetricSpecResponse {
            metric_specs: vec![spec],
        }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let GetMetricsRequest {
            scaled_object_ref,
            metric_name,
        } = request.into_inner();
        let object = scaled_object_ref.unwrap_or_default();
        let wanted = self.scaler.wanted(&object)?;
        if metric_name != WANTED_METRIC {
            let message = format!("the only metric is {WANTED_METRIC:?}");
            return Err(Status::not_found(message));
        }
        let value = MetricValue {
            metric_name,
            metric_value: wanted.into(),
            metric_value_float: wanted.into(),
        };
        Ok(Response::new(GetMetricsResponse {
            metric_values: vec![value],
        }))
    }
}
