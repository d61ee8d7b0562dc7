// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Graphs: nodes of work with dependencies, built call by call or by capturing streams. A launch carries the nodes out in an order that the dependencies
//! allow, as one piece of work of its stream.

use super::registry::Registry;
use super::stream::{Stream, resolve};
use super::work::Work;
use super::{CAPTURE_UNJOINED, CAPTURE_UNMATCHED, Handle, INVALID_HANDLE, INVALID_VALUE, Result, lock};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub struct Node {
    pub handle: Handle,
    pub work: Work,
    /// Numbers of nodes of the same graph.
    pub after: Vec<usize>,
    /// It was destroyed: only its number is still there.
    is_gone: bool,
}

#[derive(Default)]
pub struct Graph {
    nodes: Mutex<Vec<Node>>,
}

/// A graph that can be launched: its nodes, in order.
pub struct Executable {
    nodes: Mutex<Vec<Node>>,
}

pub static GRAPHS: Registry<Graph> = Registry::new(INVALID_VALUE);
pub static EXECUTABLES: Registry<Executable> = Registry::new(INVALID_VALUE);
/// Which graph a node is in, and its number there.
static NODES: Registry<(Arc<Graph>, usize)> = Registry::new(INVALID_HANDLE);

pub fn create() -> Result<Handle> {
    Ok(GRAPHS.insert(Arc::default()))
}

pub fn destroy(handle: Handle) -> Result {
    let graph = GRAPHS.remove(handle)?;
    for node in lock(&graph.nodes).iter().filter(|node| !node.is_gone) {
        NODES.remove(node.handle)?;
    }
    Ok(())
}

impl Graph {
    fn add(self: &Arc<Graph>, work: Work, after: Vec<usize>) -> usize {
        let mut nodes = lock(&self.nodes);
        let number = nodes.len();
        let handle = NODES.insert(Arc::new((self.clone(), number)));
        nodes.push(Node { handle, work, after, is_gone: false });
        number
    }

    fn numbers(self: &Arc<Graph>, handles: &[Handle]) -> Result<Vec<usize>> {
        handles
            .iter()
            .map(|&handle| match &*NODES.get(handle)? {
                (graph, number) if Arc::ptr_eq(graph, self) => Ok(*number),
                _ => Err(INVALID_VALUE),
            })
            .collect()
    }

    /// The nodes, each behind those that it depends on.
    fn ordered(&self) -> Result<Vec<Node>> {
        let nodes = lock(&self.nodes).clone();
        let mut waits: Vec<usize> = nodes.iter().map(|node| node.after.len()).collect();
        let mut ready: Vec<usize> = (0..nodes.len()).rev().filter(|&number| waits[number] == 0).collect();
        let mut out = Vec::with_capacity(nodes.len());
        while let Some(number) = ready.pop() {
            out.push(nodes[number].clone());
            for (other, node) in nodes.iter().enumerate() {
                let edges = node.after.iter().filter(|&&after| after == number).count();
                waits[other] -= edges;
                if edges > 0 && waits[other] == 0 {
                    ready.push(other);
                }
            }
        }
        // A cycle leaves some out.
        if out.len() < nodes.len() {
            return Err(INVALID_VALUE);
        }
        out.retain(|node| !node.is_gone);
        Ok(out)
    }
}

/// A new node of a graph, after others.
pub fn add(graph: Handle, after: &[Handle], work: Work) -> Result<Handle> {
    let graph = GRAPHS.get(graph)?;
    let after = graph.numbers(after)?;
    let number = graph.add(work, after);
    let nodes = lock(&graph.nodes);
    Ok(nodes[number].handle)
}

/// A node that stands for all nodes of another graph, as they are now.
pub fn add_child(graph: Handle, after: &[Handle], child: Handle) -> Result<Handle> {
    let works = GRAPHS.get(child)?.ordered()?.into_iter().map(|node| node.work).collect();
    add(graph, after, Work::Graph(Arc::new(works)))
}

pub fn add_dependencies(graph: Handle, from: &[Handle], to: &[Handle]) -> Result {
    let graph = GRAPHS.get(graph)?;
    let (from, to) = (graph.numbers(from)?, graph.numbers(to)?);
    let mut nodes = lock(&graph.nodes);
    from.iter().zip(&to).for_each(|(&from, &to)| nodes[to].after.push(from));
    Ok(())
}

pub fn remove_dependencies(graph: Handle, from: &[Handle], to: &[Handle]) -> Result {
    let graph = GRAPHS.get(graph)?;
    let (from, to) = (graph.numbers(from)?, graph.numbers(to)?);
    let mut nodes = lock(&graph.nodes);
    for (from, to) in from.iter().zip(&to) {
        let after = &mut nodes[*to].after;
        after.remove(after.iter().position(|other| other == from).ok_or(INVALID_VALUE)?);
    }
    Ok(())
}

/// Takes a node and its edges out of its graph.
pub fn destroy_node(handle: Handle) -> Result {
    let place = NODES.remove(handle)?;
    let mut nodes = lock(&place.0.nodes);
    nodes.iter_mut().for_each(|node| node.after.retain(|&other| other != place.1));
    let node = &mut nodes[place.1];
    (node.is_gone, node.work, node.after) = (true, Work::Nothing, Vec::new());
    Ok(())
}

/// A graph with the same nodes and edges.
pub fn clone(handle: Handle) -> Result<Handle> {
    let old = lock(&GRAPHS.get(handle)?.nodes).clone();
    let new = create()?;
    let graph = GRAPHS.get(new)?;
    for node in old {
        let number = graph.add(node.work, node.after);
        lock(&graph.nodes)[number].is_gone = node.is_gone;
    }
    Ok(new)
}

/// Handles of all nodes, or of those without dependencies.
pub fn nodes(graph: Handle, roots: bool) -> Result<Vec<Handle>> {
    let graph = GRAPHS.get(graph)?;
    let nodes = lock(&graph.nodes);
    Ok(nodes
        .iter()
        .filter(|node| !node.is_gone && (!roots || node.after.is_empty()))
        .map(|node| node.handle)
        .collect())
}

pub fn edges(graph: Handle) -> Result<Vec<(Handle, Handle)>> {
    let graph = GRAPHS.get(graph)?;
    let nodes = lock(&graph.nodes);
    Ok(nodes
        .iter()
        .flat_map(|node| node.after.iter().map(|&after| (nodes[after].handle, node.handle)))
        .collect())
}

/// CUgraphNodeType.
pub fn node_type(handle: Handle) -> Result<i32> {
    let place = NODES.get(handle)?;
    let nodes = lock(&place.0.nodes);
    Ok(match nodes[place.1].work {
        Work::Kernel(_) => 0,
        Work::Copy(_) => 1,
        Work::Fill(_) => 2,
        Work::Host(_) => 3,
        Work::Graph(_) => 4,
        Work::Nothing => 5,
        Work::Free(_) => 11,
    })
}

pub fn set_work(handle: Handle, work: Work) -> Result {
    let place = NODES.get(handle)?;
    lock(&place.0.nodes)[place.1].work = work;
    Ok(())
}

pub fn instantiate(graph: Handle) -> Result<Handle> {
    let nodes = GRAPHS.get(graph)?.ordered()?;
    Ok(EXECUTABLES.insert(Arc::new(Executable { nodes: Mutex::new(nodes) })))
}

pub fn set_executable_work(executable: Handle, node: Handle, work: Work) -> Result {
    let executable = EXECUTABLES.get(executable)?;
    let mut nodes = lock(&executable.nodes);
    nodes.iter_mut().find(|other| other.handle == node).ok_or(INVALID_VALUE)?.work = work;
    Ok(())
}

/// Gives an executable the work of a graph of the same shape. False when the shapes differ.
pub fn update(executable: Handle, graph: Handle) -> Result<bool> {
    let (executable, new) = (EXECUTABLES.get(executable)?, GRAPHS.get(graph)?.ordered()?);
    let mut nodes = lock(&executable.nodes);
    let same = nodes.len() == new.len()
        && nodes
            .iter()
            .zip(&new)
            .all(|(old, new)| std::mem::discriminant(&old.work) == std::mem::discriminant(&new.work));
    if same {
        nodes.iter_mut().zip(new).for_each(|(old, new)| old.work = new.work);
    }
    Ok(same)
}

pub fn launch(executable: Handle, stream: Handle) -> Result {
    let (context, stream) = resolve(stream)?;
    let executable = EXECUTABLES.get(executable)?;
    let works = lock(&executable.nodes).iter().map(|node| node.work.clone()).collect();
    stream.submit(&context, Work::Graph(Arc::new(works)))
}

/// A capture that is going on.
pub struct Capture {
    pub id: u64,
    pub graph: Handle,
    nodes: Arc<Graph>,
    /// The last nodes of each stream that takes part, by its id.
    last: Mutex<HashMap<u64, Vec<usize>>>,
    joined: Mutex<Vec<Arc<Stream>>>,
}

impl Capture {
    /// A stream's next node.
    pub fn record(&self, stream: &Stream, work: Work) -> Result {
        let mut last = lock(&self.last);
        let after = last.remove(&stream.id).unwrap_or_default();
        last.insert(stream.id, vec![self.nodes.add(work, after)]);
        Ok(())
    }

    pub fn ends(&self, stream: &Stream) -> Vec<usize> {
        lock(&self.last).get(&stream.id).cloned().unwrap_or_default()
    }

    /// The stream's next node comes after these; the stream takes part from now on.
    pub fn join(self: &Arc<Capture>, stream: &Arc<Stream>, nodes: &[usize]) -> Result {
        let mut capture = lock(&stream.capture);
        if capture.is_none() {
            *capture = Some(self.clone());
            lock(&self.joined).push(stream.clone());
        }
        lock(&self.last).entry(stream.id).or_default().extend(nodes);
        Ok(())
    }

    pub fn end_handles(&self, stream: &Stream) -> Vec<Handle> {
        let nodes = lock(&self.nodes.nodes);
        self.ends(stream).into_iter().map(|number| nodes[number].handle).collect()
    }

    /// Did all streams that joined come back to the first?
    fn whole(&self, origin: &Stream) -> bool {
        let nodes = lock(&self.nodes.nodes);
        let last = lock(&self.last);
        let used = |number: usize| nodes.iter().any(|node| node.after.contains(&number));
        let own = last.get(&origin.id).cloned().unwrap_or_default();
        last.iter()
            .filter(|(id, _)| **id != origin.id)
            .all(|(_, ends)| ends.iter().all(|&end| used(end) || own.contains(&end)))
    }
}

pub fn begin_capture(stream: Handle, graph: Option<Handle>, after: &[Handle]) -> Result {
    let (_, stream) = resolve(stream)?;
    let mut capture = lock(&stream.capture);
    if capture.is_some() {
        return Err(super::ILLEGAL_STATE);
    }
    let graph = graph.map_or_else(create, Ok)?;
    let nodes = GRAPHS.get(graph)?;
    let last = HashMap::from([(stream.id, nodes.numbers(after)?)]);
    let id = super::registry::handle() as u64;
    *capture = Some(Arc::new(Capture { id, graph, nodes, last: Mutex::new(last), joined: Mutex::default() }));
    Ok(())
}

pub fn end_capture(handle: Handle) -> Result<Handle> {
    let (_, stream) = resolve(handle)?;
    let capture = lock(&stream.capture).take().ok_or(CAPTURE_UNMATCHED)?;
    let whole = capture.whole(&stream);
    for joined in lock(&capture.joined).drain(..) {
        *lock(&joined.capture) = None;
    }
    if whole {
        return Ok(capture.graph);
    }
    destroy(capture.graph)?;
    Err(CAPTURE_UNJOINED)
}
