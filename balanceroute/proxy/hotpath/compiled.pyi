from balanceroute.proxy.hotpath.reference import ChunkReader as ChunkReader
from balanceroute.proxy.hotpath.reference import EventMatcher as EventMatcher
from balanceroute.proxy.hotpath.reference import EventPump as EventPump
from balanceroute.proxy.hotpath.reference import Flusher as Flusher
from balanceroute.proxy.hotpath.reference import PartWriter as PartWriter
from balanceroute.proxy.hotpath.reference import unchunked as unchunked
