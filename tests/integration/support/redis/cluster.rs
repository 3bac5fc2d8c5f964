//! Three masters that share the slots between them.

use super::super::hedgerow::again_until;
use super::super::soon;
use super::{RedisServer, Setup};

const SLOTS: usize = 16384;
const NODES: usize = 3;

/// A cluster without replicas. Without one of its nodes it serves nothing, as clusters do unless told otherwise.
pub struct RedisCluster {
    /// The nodes, in the order of their slots.
    pub nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Open to all.
    pub async fn start() -> Self {
        Self::start_of(|setup| setup).await
    }

    /// Of nodes that are refined so. Their passwords must be the same.
    pub async fn start_of(refine: impl Fn(Setup) -> Setup) -> Self {
        let mut nodes = Vec::new();
        for nth in 0..NODES {
            let node = refine(RedisServer::with().node()).start().await;
            let (first, last) = (SLOTS * nth / NODES, SLOTS * (nth + 1) / NODES - 1);
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            nodes.push(node);
        }
        for other in &nodes[1..] {
            let bus = other.setup.bus.as_ref().expect("a node has a bus").number().to_string();
            nodes[0].command(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string(), &bus]);
        }
        let this = Self { nodes };
        this.until_complete().await;
        this
    }

    /// The node that has this key.
    pub fn node_of(&self, key: &str) -> &RedisServer {
        let slot = self.nodes[0].command(&["CLUSTER", "KEYSLOT", key]).integer();
        let slot = usize::try_from(slot).expect("a slot is not negative");
        let nth = (0..NODES).find(|nth| slot < SLOTS * (nth + 1) / NODES);
        &self.nodes[nth.expect("a slot is one of those there are")]
    }

    /// The keys of all nodes that match, sorted.
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<_> = self.nodes.iter().flat_map(|node| node.keys(pattern)).collect();
        keys.sort();
        keys
    }

    /// Waits until every node says that all slots are served.
    pub async fn until_complete(&self) {
        let is_well = |node: &RedisServer| {
            let info = node.command(&["CLUSTER", "INFO"]).text();
            info.contains("cluster_state:ok") && info.contains(&format!("cluster_known_nodes:{NODES}"))
        };
        let is_done = async || self.nodes.iter().all(is_well).then_some(());
        soon(again_until(is_done)).await;
    }
}
