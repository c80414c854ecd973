//! Pods of a StatefulSet: scaled up and down under load, killed, restarted and moved, without
//! `quorate member`. A stand-in for the API server reports the wanted number.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use state::ids::ReplicaId;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// Time after which an absent pod counts as gone.
const ABSENT_AFTER: Duration = Duration::from_millis(500);

/// An API server with one StatefulSet.
struct ApiServer {
    url: String,
    /// Wanted number of pods; 0 makes the server refuse.
    replicas: Arc<AtomicUsize>,
    reads: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl ApiServer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let replicas = Arc::new(AtomicUsize::new(3));
        let reads = Arc::<AtomicUsize>::default();
        let (wanted, read) = (Arc::clone(&replicas), Arc::clone(&reads));
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                answer(stream, wanted.load(Ordering::SeqCst)).await;
                read.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self {
            url,
            replicas,
            reads,
            serving,
        }
    }

    fn scale_to(&self, replicas: usize) {
        self.replicas.store(replicas, Ordering::SeqCst);
    }

    /// Waits for this many further requests.
    async fn asked(&self, times: usize) {
        let before = self.reads.load(Ordering::SeqCst);
        let is_asked = async || self.reads.load(Ordering::SeqCst) >= before + times;
        until("the API server is asked", is_asked).await;
    }
}

async fn answer(mut stream: TcpStream, replicas: usize) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = stream.read_u8().await else {
            return;
        };
        head.push(byte);
    }
    let head = String::from_utf8(head).unwrap();
    let path = "GET /apis/apps/v1/namespaces/llm/statefulsets/quorate HTTP/1.1\r\n";
    assert!(head.starts_with(path), "{head}");
    let (status, body) = match replicas {
        0 => (
            "503 Service Unavailable",
            json!({"message": "etcd is away"}),
        ),
        _ => ("200 OK", json!({"spec": {"replicas": replicas}})),
    };
    let body = body.to_string();
    let length = body.len();
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
    // The client may be gone.
    drop(stream.write_all(answer.as_bytes()).await);
}

/// The pods and their environment.
struct Pods {
    api: ApiServer,
    engines: Vec<EngineHandle>,
    dir: TempDir,
    founders: Vec<String>,
    running: Vec<(u8, Replica)>,
    http: Http,
}

impl Pods {
    /// Starts three pods.
    async fn start() -> Self {
        let (api, engines, dir) = (
            ApiServer::start().await,
            engines(1).await,
            TempDir::new().unwrap(),
        );
        let sockets: Vec<_> = (0..3).map(|_| sockets()).collect();
        let founders = sockets.iter();
        let founders = founders.map(|bound| bound.addresses().unwrap().peer.to_string());
        let mut pods = Self {
            founders: founders.collect(),
            api,
            engines,
            dir,
            running: Vec::new(),
            http: Http::new(),
        };
        for (id, sockets) in (1..).zip(sockets) {
            let replica = Replica::run(pods.config(id), sockets);
            pods.running.push((id, replica));
        }
        pods.http.ready(&pods.addresses()).await;
        pods
    }

    fn config(&self, id: u8) -> Config {
        let founders = &self.founders;
        let mut config = config(id.into(), founders, &self.engines, self.dir.path());
        config.drain.dns_ttl = Duration::from_millis(300);
        let cluster = &mut config.cluster;
        cluster.replace_lost = true;
        cluster.auto_promote = true;
        cluster.promote_after = Duration::from_millis(500);
        let set = &mut cluster.statefulset;
        set.name = Some("quorate".to_owned());
        set.access.namespace = Some("llm".to_owned());
        set.access.api_server = api::engines::backends::EngineUrl::parse(&self.api.url).ok();
        set.remove_absent_after = ABSENT_AFTER;
        config
    }

    /// Starts a pod at free addresses, with its volume if it has one.
    async fn create(&mut self, id: u8) {
        let replica = Replica::run(self.config(id), sockets());
        let at = replica.addresses;
        self.running.push((id, replica));
        self.http.ready(&[at]).await;
    }

    fn take(&mut self, id: u8) -> Replica {
        let nth = self.running.iter().position(|(other, _)| *other == id);
        self.running.remove(nth.expect("the pod runs")).1
    }

    /// Kills a pod.
    async fn kill(&mut self, id: u8) {
        let replica = self.take(id);
        replica.shutdown.abort();
        replica.leave().await;
    }

    fn lose_volume(&self, id: u8) {
        std::fs::remove_dir_all(self.dir.path().join(format!("n{id}"))).unwrap();
    }

    fn addresses(&self) -> Vec<Addresses> {
        self.running.iter().map(|(_, it)| it.addresses).collect()
    }

    async fn cluster(&self, at: &Addresses) -> Value {
        let url = format!("http://{}/admin/v1/cluster", at.admin);
        self.http.get(&url).await.1
    }

    /// Waits until all pods see these voters and learners.
    async fn have(&self, voters: &[u8], learners: &[u8]) {
        let all_have = async || {
            for at in self.addresses() {
                let members = self.cluster(&at).await["members"].clone();
                let of = |votes: bool| -> Vec<u8> {
                    let members = members.as_object().unwrap().iter();
                    let members = members.filter(|(_, it)| it["is_voter"] == votes);
                    members.map(|(id, _)| id.parse().unwrap()).collect()
                };
                if (of(true), of(false)) != (voters.to_vec(), learners.to_vec()) {
                    return false;
                }
            }
            true
        };
        until(&format!("{voters:?} vote, {learners:?} do not"), all_have).await;
    }

    async fn leader(&self) -> u8 {
        let leader = Mutex::new(0);
        let is_known = async || {
            let status = self.cluster(&self.addresses()[0]).await;
            let known = status["leader"].as_u64().unwrap_or(0);
            *leader.lock().unwrap() = u8::try_from(known).unwrap();
            status["has_quorum"] == true && known > 0
        };
        until("somebody leads", is_known).await;
        leader.into_inner().unwrap()
    }

    /// Makes a pod the leader.
    async fn lead(&mut self, id: u8) {
        let (_, replica) = self.running.iter_mut().find(|it| it.0 == id).unwrap();
        let cluster = (&mut replica.started).await.unwrap().cluster;
        let leads = async || {
            let taken = cluster.transfer_leader(Some(ReplicaId(id))).await;
            taken.is_ok()
        };
        until("the pod leads", leads).await;
    }

    async fn end(self) {
        self.api.scale_to(self.running.len().max(3));
        for (_, replica) in self.running {
            replica.leave().await;
        }
    }
}

fn sockets() -> BoundSockets {
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listen = ListenConfig {
        data: any,
        admin: any,
        peer: any,
        metrics: None,
        picker: None,
        scaler: None,
        advertise: None,
    };
    BoundSockets::bind(&listen).unwrap()
}

/// Sends requests to the pods behind a load balancer until stopped. Each must succeed.
struct Clients {
    pods: Arc<Mutex<Vec<Addresses>>>,
    stop: Arc<AtomicBool>,
    sending: Vec<JoinHandle<u32>>,
}

impl Clients {
    fn of(pods: &Pods) -> Self {
        let (targets, stop) = (
            Arc::new(Mutex::new(pods.addresses())),
            Arc::<AtomicBool>::default(),
        );
        let send = |user: usize| {
            let (targets, stop) = (Arc::clone(&targets), Arc::clone(&stop));
            tokio::spawn(async move {
                let (http, user) = (Http::new(), format!("user-{user}"));
                let mut sent = 0;
                while !stop.load(Ordering::Relaxed) {
                    let target = {
                        let targets = targets.lock().unwrap();
                        targets[sent as usize % targets.len()]
                    };
                    http.chat(&target, &user, &format!("Is it lit? {sent}"))
                        .await;
                    sent += 1;
                }
                sent
            })
        };
        let sending = (0..3).map(send).collect();
        Self {
            pods: targets,
            stop,
            sending,
        }
    }

    fn use_only(&self, pods: &Pods) {
        *self.pods.lock().unwrap() = pods.addresses();
    }

    /// Stops, checks that none failed, and returns the number of requests.
    async fn end(self) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        let mut sent = 0;
        for sending in self.sending {
            sent += sending.await.unwrap();
        }
        sent
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statefulset_scales_to_five_and_back_under_load() {
    let mut pods = Pods::start().await;
    let clients = Clients::of(&pods);
    pods.api.scale_to(5);
    pods.create(4).await;
    pods.create(5).await;
    clients.use_only(&pods);
    pods.have(&[1, 2, 3, 4, 5], &[]).await;

    // Both are stopped at once, and one of them leads.
    pods.lead(5).await;
    pods.api.scale_to(3);
    let going = [pods.take(4), pods.take(5)];
    clients.use_only(&pods);
    going.iter().for_each(|pod| pod.shutdown.drain());
    for pod in going {
        pod.leave().await;
    }
    // They removed themselves, before any other replica missed them.
    pods.have(&[1, 2, 3], &[]).await;
    pods.leader().await;

    // They return: one with its volume at another address, one that lost its volume.
    pods.lose_volume(5);
    pods.api.scale_to(5);
    pods.create(4).await;
    pods.create(5).await;
    clients.use_only(&pods);
    pods.have(&[1, 2, 3, 4, 5], &[]).await;
    assert!(clients.end().await > 20);
    pods.http.quiet(&pods.addresses()[0]).await;
    pods.http.agree(&pods.addresses()).await;
    pods.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_pods_are_distinguished_from_restarting_ones() {
    let mut pods = Pods::start().await;
    pods.api.scale_to(4);
    pods.create(4).await;
    // Four voters tolerate no more failures than three.
    pods.have(&[1, 2, 3], &[4]).await;

    // A restarting pod stays a member, however long it is away.
    let moved = pods.leader().await % 3 + 1;
    pods.take(moved).leave().await;
    pods.api.asked(2).await;
    let rest: Vec<u8> = (1..=3).collect();
    pods.have(&rest, &[4]).await;
    pods.create(moved).await;

    // A pod is killed while it is scaled away, and at first the server does not report that.
    pods.api.scale_to(0);
    pods.kill(4).await;
    let leader = pods.leader().await;
    let at = pods.running.iter().find(|(id, _)| *id == leader);
    let at = at.unwrap().1.addresses;
    let says = async || {
        let why = pods.cluster(&at).await["scaling"].to_string();
        let (_, ready) = pods.http.get(&format!("http://{}/readyz", at.admin)).await;
        let page = pods.http.metrics(at.admin).await;
        why.contains("cannot be read, and replicas are away: 4")
            && why.contains("etcd is away")
            && ready.to_string().contains("members: StatefulSet quorate")
            && page.contains("quorate_raft_scaling_is_held 1")
    };
    until("the leader says why it does nothing", says).await;
    pods.have(&rest, &[4]).await;
    pods.api.scale_to(3);
    pods.have(&rest, &[]).await;

    // The pod is wanted again, and starts with its old volume.
    pods.api.scale_to(4);
    pods.create(4).await;
    pods.have(&rest, &[4]).await;
    pods.http.agree(&pods.addresses()).await;

    // The cluster never shrinks below its founding size: stopped pods stay members.
    pods.api.scale_to(1);
    pods.take(4).leave().await;
    pods.have(&rest, &[]).await;
    let gone = pods.leader().await % 3 + 1;
    pods.take(gone).leave().await;
    pods.have(&rest, &[]).await;
    pods.end().await;
}
